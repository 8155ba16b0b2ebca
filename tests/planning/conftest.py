"""One cache for the tests that compile: the environment they compile in takes a minute to build."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def plan_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for plans and their environment."""
    return tmp_path_factory.mktemp("plan-cache")

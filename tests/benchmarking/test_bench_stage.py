"""`workloads.bench`: options that would be ignored are refused before anything starts."""

from __future__ import annotations

import pytest

from gemma_ray.errors import InputError
from gemma_ray.recipe import parse_recipe
from workloads import bench
from workloads.progress import Progress


@pytest.mark.parametrize("options", [{"url": ""}, {"model": "m"}, {"url": "http://127.0.0.1:99999"}, {"url": "127.0.0.1:8000"}])
def test_an_address_that_is_none_and_a_model_without_one(tmp_path, options):
    run = {"dir": str(tmp_path / "run"), "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(InputError, match=r"--url|--model"):
        bench.run(parse_recipe({"run": run}), Progress(), **options)
    assert not list(tmp_path.iterdir())

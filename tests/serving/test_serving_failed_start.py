"""A model that vLLM cannot run, through Ray Serve: the caller hears why in one line, long before the ready timeout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemma_ray.artifacts import read_json, write_json
from gemma_ray.errors import RecipeError, StageError
from gemma_ray.serving.application import serve_models
from gemma_ray.serving.config import ServeConfig
from gemma_ray.serving.deployment import ServedModel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    import ray

    assert not ray.is_initialized()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture
def config(free_port: int) -> ServeConfig:
    return ServeConfig(
        port=free_port, max_model_len=512, engine={"dtype": "float32", "kv_cache_memory_bytes": 128 << 20}, ready_timeout_s=3000
    )


def change_config(folder: Path, **changes: object) -> Path:
    write_json(folder / "config.json", {**read_json(folder / "config.json"), **changes})
    return folder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 16}, "16"),  # the engine's process fails: CPU attention has no such kernel
        ({"architectures": ["NoSuchModel"]}, "NoSuchModel"),  # the replica itself fails
    ],
)
def test_a_failed_replica_is_one_line_with_vllms_reason_and_a_log(
    changes: dict[str, object], reason: str, tiny_model_copy: Path, config: ServeConfig
):
    from ray import serve

    with pytest.raises(StageError) as failure:
        serve_models([ServedModel("broken", change_config(tiny_model_copy, **changes))], config)
    message = str(failure.value)
    assert "\n" not in message
    assert "broken" in message
    assert reason in message
    log = re.search(r"\(log: (.+)\)$", message)
    assert log
    assert reason in Path(log[1]).read_text()
    assert not serve.status().applications


def test_an_unknown_engine_argument_is_the_recipes_fault(tiny_model: Path, config: ServeConfig):
    wrong = config.model_copy(update={"engine": {**config.engine, "max_model_length": 4}})
    with pytest.raises(RecipeError, match="max_model_length"):
        serve_models([ServedModel("base", tiny_model)], wrong)

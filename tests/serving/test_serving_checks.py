"""What is refused before anything starts."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gemma_ray.errors import ModelError, ResourceError
from gemma_ray.serving import checks
from gemma_ray.serving.config import ServeConfig
from gemma_ray.serving.deployment import ServedModel


def test_a_taken_port_is_named_with_the_key_to_change():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=rf"port {port} on 127\.0\.0\.1 is in use.*serve\.port"):
            checks.check_port("127.0.0.1", port)
        with pytest.raises(ResourceError, match="in use"):
            checks.check_port("0.0.0.0", port)
    checks.check_port("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused(free_port: int):
    with pytest.raises(ResourceError, match=r"serve\.host = '192\.0\.2\.1'"):
        checks.check_port("192.0.2.1", free_port)


def test_a_whole_folder_passes(tiny_model: Path):
    checks.check_models([ServedModel("base", tiny_model), ServedModel("org/tuned-1.0", tiny_model)])


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "1 of 1 weight files are missing, the first: model.safetensors"),
        ("tokenizer.json", "no tokenizer"),
    ],
)
def test_a_missing_file_is_named(tiny_model_copy: Path, file: str, message: str):
    (tiny_model_copy / file).unlink()
    with pytest.raises(ModelError, match=message):
        checks.check_model_folder(tiny_model_copy)


def test_weights_without_an_index_are_enough_and_no_weights_are_not(tiny_model_copy: Path):
    (tiny_model_copy / "model.safetensors.index.json").unlink()
    checks.check_model_folder(tiny_model_copy)
    (tiny_model_copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no \\*\\.safetensors"):
        checks.check_model_folder(tiny_model_copy)


def test_a_damaged_config_is_named(tiny_model_copy: Path):
    (tiny_model_copy / "config.json").write_text("{")
    with pytest.raises(ModelError, match="damaged"):
        checks.check_model_folder(tiny_model_copy)


@pytest.mark.parametrize(("names", "message"), [([], "no model"), (["a", "a"], "two models"), (["base:x"], "model name 'base:x'")])
def test_names_must_be_there_and_differ_and_fit_a_url(tiny_model: Path, names: list[str], message: str):
    with pytest.raises(ModelError, match=message):
        checks.check_models([ServedModel(name, tiny_model) for name in names])


def test_memory_is_weights_in_the_engines_dtype_and_cache_and_processes_per_replica(tiny_model: Path):
    weights = (tiny_model / "model.safetensors").stat().st_size  # float32
    models = [ServedModel("a", tiny_model), ServedModel("b", tiny_model)]
    for dtype, scale in (("float32", 1), ("bfloat16", 0.5)):
        config = ServeConfig(min_replicas=3, max_replicas=3, engine={"dtype": dtype, "kv_cache_memory_bytes": 1000})
        assert checks.memory_needed_bytes(models, config) == 6 * (weights * scale + 1000 + checks.ENGINE_PROCESS_BYTES)


def test_too_little_memory_names_need_and_have_and_the_key(tiny_model: Path):
    config = ServeConfig(engine={"kv_cache_memory_bytes": 64 << 30})
    with pytest.raises(ResourceError, match=r"needs 65\.6 GiB of memory and 20\.0 GiB are available.*serve\.engine\.kv_cache_memory_bytes"):
        checks.check_memory([ServedModel("base", tiny_model)], config, available_bytes=20 << 30)
    checks.check_memory([ServedModel("base", tiny_model)], config, available_bytes=66 << 30)


def test_available_memory_is_at_most_the_machines():
    assert 0 < checks.available_memory_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_replicas": 2}, "min_replicas = 2 is more than max_replicas = 1"),
        ({"accelerator": "gpu", "topology": "2x4"}, "topology is for accelerator: tpu"),
        ({"accelerator": "tpu", "topology": "2x4"}, "needs accelerator_type"),
        ({"accelerator": "tpu", "topology": "eight"}, "topology"),
        ({"accelerator_type": "H100"}, "gpu or tpu"),
    ],
)
def test_a_serve_section_that_contradicts_itself_is_refused(values: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        ServeConfig(**values)

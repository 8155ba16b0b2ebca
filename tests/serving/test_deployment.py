"""What Ray Serve LLM and vLLM make of a serve section, by their own config classes; nothing is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma_ray.serving.config import ServeConfig
from gemma_ray.serving.deployment import ServedModel, cpu_environment, engine_arguments, llm_settings


def upstream(config: ServeConfig, tiny_model: Path) -> tuple[Any, Any]:
    """Ray Serve LLM's (LLMConfig, engine config) for one model."""
    from ray.serve.llm import LLMConfig

    llm = LLMConfig(**llm_settings(ServedModel("base", tiny_model), config, engines=2, job_environment={"KEPT": "1"}))
    return llm, llm.get_engine_config()


def test_a_cpu_replica_claims_its_cpus_once(tiny_model: Path):
    llm, engine = upstream(ServeConfig(cpus_per_replica=0.5), tiny_model)
    assert engine.placement_bundles == [{"CPU": 0.5}]
    assert llm.deployment_config["ray_actor_options"]["num_cpus"] == 0


def test_a_tpu_slice_is_one_rank_a_chip_and_hosts_whole(tiny_model: Path):
    config = ServeConfig(accelerator="tpu", accelerator_type="TPU-V6E", topology="4x4")
    llm, engine = upstream(config, tiny_model)
    assert llm.accelerator_config.topology == "4x4"
    assert engine.tensor_parallel_degree == 16
    assert [bundle["TPU"] for bundle in engine.placement_bundles] == [4, 4, 4, 4]
    assert engine.accelerator.requires_deferred_placement_group


def test_one_tpu_host_is_one_bundle(tiny_model: Path):
    _, engine = upstream(ServeConfig(accelerator="tpu", accelerator_type="TPU-V6E", topology="2x4"), tiny_model)
    assert [bundle["TPU"] for bundle in engine.placement_bundles] == [8]


def test_gpus_follow_the_engines_own_tensor_parallelism(tiny_model: Path):
    config = ServeConfig(accelerator="gpu", accelerator_type="H100", engine={"tensor_parallel_size": 2})
    _, engine = upstream(config, tiny_model)
    assert [bundle["GPU"] for bundle in engine.placement_bundles] == [1, 1]
    assert "enforce_eager" not in engine.engine_kwargs


def test_replicas_scale_between_the_recipes_bounds(tiny_model: Path):
    llm, _ = upstream(ServeConfig(min_replicas=0, max_replicas=4, target_ongoing_requests=8), tiny_model)
    assert llm.deployment_config["autoscaling_config"] == {"min_replicas": 0, "max_replicas": 4, "target_ongoing_requests": 8}


def test_the_jobs_environment_is_kept_and_nothing_is_looked_up_on_a_hub(tiny_model: Path):
    llm, _ = upstream(ServeConfig(), tiny_model)
    variables = llm.runtime_env["env_vars"]
    assert (variables["KEPT"], variables["HF_HUB_OFFLINE"]) == ("1", "1")


def test_the_recipes_engine_arguments_win_over_the_defaults():
    config = ServeConfig(max_model_len=99, engine={"max_num_seqs": 3, "enforce_eager": False})
    arguments = engine_arguments(config)
    whole_prompts = {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096}
    assert arguments == {
        "enforce_eager": False,
        "kv_cache_memory_bytes": 1 << 30,
        "max_num_seqs": 3,
        "max_model_len": 99,
        **whole_prompts,
    }


@pytest.mark.parametrize(("cores", "engines", "threads"), [(8, 2, "3"), (2, 2, "1"), (2, 3, "1"), (8, 1, "7"), (2, 1, "1")])
def test_engines_on_a_machine_share_its_cores_but_one_each(monkeypatch: pytest.MonkeyPatch, cores: int, engines: int, threads: str):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    assert cpu_environment(engines)["OMP_NUM_THREADS"] == threads

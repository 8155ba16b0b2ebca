"""From a ServeConfig to a Ray Serve application: one deployment a model, one front door before them.

    client ── HTTP ── proxy (head node) ── FrontDoor ─┬─ ModelServer 'base'   ── vLLM engine
                                                      └─ ModelServer 'tuned'  ── vLLM engine

`ACCELERATORS` is the table of what differs between CPU, GPU and TPU. The front door claims no CPU, so that a laptop's few logical CPUs all
go to models.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemma_ray.errors import RecipeError
from gemma_ray.serving.config import ServeConfig
from gemma_ray.serving.failures import one_line


@dataclass(frozen=True)
class ServedModel:
    """A model folder (Hugging Face files) and the name that clients call it by."""

    id: str
    path: Path


OFFLINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # models and tokenizers are folders: nothing is looked up on a hub
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment of every vLLM process that this project starts."""


def cpu_environment(processes: int) -> dict[str, str]:
    """Environment of one of `processes` vLLM engines that share this machine's CPUs.

    vLLM's own binding gives every engine the same first cores: two on a two-core machine made 730 tokens/s together, and 980 with a share
    of threads each that the kernel places. As in vLLM's binding, one core an engine is left to its server.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        **OFFLINE_ENVIRONMENT,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, cores // processes - 1)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or vLLM would undo CpuEngine's choice; the engine is still a process of its own
    }


@dataclass(frozen=True)
class Accelerator:
    """How a model is deployed on one kind of hardware.

    `engine` holds defaults of vLLM's engine arguments, `environment` maps the number of engines on a machine to environment variables,
    `server` names the class in `server.py`. With `bundle_cpus` the placement group's bundles are CPUs alone; otherwise Ray Serve LLM adds
    GPUs or TPU chips.
    """

    server: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    environment: Callable[[int], dict[str, str]] = lambda engines: dict(OFFLINE_ENVIRONMENT)
    bundle_cpus: bool = False
    whole_prompts: bool = False
    """Never cut a prompt into chunks, see `whole_prompt_arguments`."""


ACCELERATORS: dict[str, Accelerator] = {
    "cpu": Accelerator(
        server="CpuModelServer",
        # Eager: torch.compile costs minutes at start and gains little on CPU. An explicit KV cache: by default each engine takes most of
        # the machine's memory, and runs the model once to see how much that is.
        engine={"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30, "max_num_seqs": 64},
        whole_prompts=True,
        environment=cpu_environment,
        bundle_cpus=True,
    ),
    "gpu": Accelerator(server="ModelServer"),
    "tpu": Accelerator(server="ModelServer"),
}


def engine_arguments(config: ServeConfig) -> dict[str, Any]:
    """vLLM's engine arguments: the accelerator's defaults, `max_model_len`, one tensor-parallel rank a chip of `topology`, then
    `serve.engine`.
    """
    accelerator = ACCELERATORS[config.accelerator]
    arguments = {**accelerator.engine, "max_model_len": config.max_model_len}
    if accelerator.whole_prompts:
        arguments |= whole_prompt_arguments(config.max_model_len)
    if config.topology:
        arguments["tensor_parallel_size"] = math.prod(int(n) for n in config.topology.split("x"))
    return {**arguments, **config.engine}


def whole_prompt_arguments(max_model_len: int) -> dict[str, Any]:
    """Engine arguments under which vLLM takes every prompt in one piece.

    Work-around: when a prompt of a request with a `seed` is cut into chunks, vLLM rewinds the request's random generator by its CUDA
    offset; a CPU generator has none ("CPU Generator does not use offset"), the engine dies, and every request in flight gets a 500
    (`vllm/v1/worker/gpu_model_runner.py`, `_bookkeeping_sync`; vLLM 0.31). `tests/serving/test_upstream_seeded_chunks.py` fails once that
    is mended.
    """
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, max_model_len)}


def llm_settings(model: ServedModel, config: ServeConfig, engines: int, job_environment: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments of Ray Serve LLM's LLMConfig for one model, as plain data.

    `engines` is the number of engines that share a machine, `job_environment` the variables that the Ray job already set for its workers.
    """
    accelerator = ACCELERATORS[config.accelerator]
    cpus = config.cpus_per_replica
    settings: dict[str, Any] = {
        "model_loading_config": {"model_id": model.id, "model_source": str(model.path.resolve())},
        "accelerator_config": {"kind": config.accelerator, **({"topology": config.topology} if config.topology else {})},
        "accelerator_type": config.accelerator_type,
        "engine_kwargs": engine_arguments(config),
        "deployment_config": {
            "autoscaling_config": {
                "min_replicas": config.min_replicas,
                "max_replicas": config.max_replicas,
                "target_ongoing_requests": config.target_ongoing_requests,
            },
            "ray_actor_options": {"num_cpus": 0 if accelerator.bundle_cpus else cpus},
            # an engine that cannot start the first time does not start the third time, half a minute later
            "max_constructor_retry_count": 1,
            "health_check_timeout_s": 60,  # on few cores a long prefill holds the replica's event loop
        },
        "experimental_configs": {"stream_batching_interval_ms": 0},  # tokens leave as they come; by default they wait up to 50 ms
        "runtime_env": {"env_vars": {**job_environment, **accelerator.environment(engines)}},
        "server_cls": f"gemma_ray.serving.server:{accelerator.server}",
        "callback_config": {"callback_class": "gemma_ray.serving.server:LocalFiles"},
    }
    if accelerator.bundle_cpus:
        settings["placement_group_config"] = {"bundle_per_worker": {"CPU": cpus}}
    return settings


def build_application(models: Sequence[ServedModel], config: ServeConfig, job_environment: Mapping[str, str]) -> Any:
    """The Serve application of all models; needs Ray connected. Raises RecipeError when vLLM or Serve refuse an argument of
    `serve.engine`.
    """
    from ray import serve
    from ray.llm._internal.serve.core.configs.openai_api_models import to_model_metadata
    from ray.llm._internal.serve.core.ingress.ingress import DEFAULT_ENDPOINTS
    from ray.serve.llm import LLMConfig, build_llm_deployment
    from ray.serve.llm.ingress import make_fastapi_ingress

    from gemma_ray.serving.server import FrontDoor

    engines = len(models) * max(1, config.min_replicas)
    try:
        llms = [LLMConfig(**llm_settings(model, config, engines, job_environment)) for model in models]
        deployments = {llm.model_id: build_llm_deployment(llm, name_prefix="model:") for llm in llms}
    except ValueError as e:
        raise RecipeError(f"serve: {one_line(str(e))}") from e
    endpoints = {**DEFAULT_ENDPOINTS, "health": lambda app: app.get("/health")}
    front_door: Any = serve.deployment(
        make_fastapi_ingress(FrontDoor, endpoint_map=endpoints),
        name="front-door",
        num_replicas=1,
        max_ongoing_requests=1_000_000,
        ray_actor_options={"num_cpus": 0},
    )
    cards = {llm.model_id: to_model_metadata(llm.model_id, llm) for llm in llms}
    return front_door.bind(llm_deployments=deployments, model_cards=cards)

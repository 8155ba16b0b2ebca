"""What is checked before anything starts, so that a mistake costs a line and not a minute."""

from __future__ import annotations

import errno
import json
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gemma_ray.artifacts import read_json
from gemma_ray.errors import ModelError, ResourceError
from gemma_ray.models.config import DTYPE_BYTES
from gemma_ray.serving.config import ServeConfig
from gemma_ray.serving.deployment import ServedModel, engine_arguments

ENGINE_PROCESS_BYTES = 1_700_000_000
"""Resident memory of a CPU replica apart from weights and KV cache: the server and its engine, two Python processes with vLLM imported
(measured).
"""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


def check_models(models: Sequence[ServedModel]) -> None:
    """Raise ModelError unless there are models, with names of their own that a URL can hold, each a whole Hugging Face folder."""
    if not models:
        raise ModelError("no model to serve")
    names = [model.id for model in models]
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]*", name):
            raise ModelError(f"model name '{name}': use letters, digits, '.', '_', '-' and '/'")
        if names.count(name) > 1:
            raise ModelError(f"two models are named '{name}'; give each its own name")
    for model in models:
        check_model_folder(model.path)


def check_model_folder(folder: Path, *, tokenizer: bool = True) -> None:
    """Raise ModelError naming what vLLM would miss in a model folder: config.json, a safetensors file of the index, a tokenizer (if it
    needs one).
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such model folder; `gemma-ray convert` writes one")
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{folder}: no config.json; a model folder holds Hugging Face files")
    index = folder / "model.safetensors.index.json"
    try:
        read_json(config)
        expected = sorted(set(read_json(index)["weight_map"].values())) if index.is_file() else []
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, AttributeError, TypeError) as e:
        raise ModelError(f"{folder}: config.json or model.safetensors.index.json is damaged: {e}") from e
    missing = [name for name in expected if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder}: {len(missing)} of {len(expected)} weight files are missing, the first: {missing[0]}")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder}: no *.safetensors weights")
    if tokenizer and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(f"{folder}: no tokenizer ({' or '.join(_TOKENIZER_FILES)}); copy the base model's beside the weights")


def check_port(host: str, port: int) -> None:
    """Raise ResourceError when `port` is taken, or `host` is no address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                raise ResourceError(f"port {port} on {host} is in use; stop what listens there, or set serve.port to a free one") from e
            if e.errno == errno.EACCES:
                raise ResourceError(f"port {port} needs root; set serve.port to 1024 or more") from e
            raise ResourceError(f"serve.host = '{host}' is not an address of this machine: {e.strerror or e}") from e


def check_cpus(engines: int, config: ServeConfig) -> None:
    """Raise ResourceError when the connected Ray cluster has fewer CPUs than the replicas claim: they would wait for ever."""
    import ray

    need, have = engines * config.cpus_per_replica, ray.cluster_resources().get("CPU", 0.0)
    if need > have:
        raise ResourceError(
            f"{engines} replicas claim {need:g} CPUs and the Ray cluster has {have:g}; lower serve.cpus_per_replica or serve.min_replicas"
        )


def check_memory(models: Sequence[ServedModel], config: ServeConfig, available_bytes: int | None = None) -> None:
    """Raise ResourceError when CPU replicas need more memory than this machine has free (`available_bytes`; None = ask)."""
    available = available_memory_bytes() if available_bytes is None else available_bytes
    need = memory_needed_bytes(models, config)
    if need > available:
        kv = engine_arguments(config).get("kv_cache_memory_bytes") or 0
        raise ResourceError(
            f"serving needs {need / 2**30:.1f} GiB of memory and {available / 2**30:.1f} GiB are available. "
            f"Each of {len(models) * config.min_replicas} replicas takes its weights, {kv / 2**30:.2g} GiB of KV cache and "
            f"{ENGINE_PROCESS_BYTES / 2**30:.1f} GiB of processes; lower serve.engine.kv_cache_memory_bytes or serve.min_replicas"
        )


def memory_needed_bytes(models: Sequence[ServedModel], config: ServeConfig) -> int:
    """Memory that `min_replicas` CPU replicas of each model take: weights in the engine's dtype, KV cache, processes."""
    engine = engine_arguments(config)
    kv = int(engine.get("kv_cache_memory_bytes") or 0)
    weights = [_weights_bytes(model.path, str(engine.get("dtype", "auto"))) for model in models]
    return config.min_replicas * sum(w + kv + ENGINE_PROCESS_BYTES for w in weights)


def available_memory_bytes() -> int:
    """Memory that can be taken without swapping: the kernel's estimate, or what is left of the container's limit when that is less."""
    import psutil

    available = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        reclaimable = re.search(r"^inactive_file (\d+)$", Path("/sys/fs/cgroup/memory.stat").read_text(), re.MULTILINE)
        free = int(text) - int(used.read_text()) + (int(reclaimable[1]) if reclaimable else 0)
        available = min(available, free)
    return available


def _weights_bytes(folder: Path, dtype: str) -> int:
    """Bytes of a folder's weights once loaded as `dtype` ('auto' = as they are)."""
    on_disk = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    config: dict[str, Any] = read_json(folder / "config.json")
    text = config.get("text_config") or config
    stored = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype"))
    if dtype in DTYPE_BYTES and stored in DTYPE_BYTES:
        return on_disk * DTYPE_BYTES[dtype] // DTYPE_BYTES[stored]
    return on_disk

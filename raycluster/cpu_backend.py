"""JAX across plain CPU processes under Ray Train.

`ray.train.v2.jax.JaxConfig` starts `jax.distributed` only when told of TPUs or GPUs (Ray 2.60), so processes on CPUs would each see
themselves alone. This backend does the one thing that is missing: process 0 opens the coordinator's port, and every process connects to it.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig


@dataclass
class CpuJaxConfig(BackendConfig):
    """Backend configuration that connects the workers' JAX processes over the CPU platform (gloo collectives)."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _CpuJaxBackend


class _CpuJaxBackend(Backend):
    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        coordinator = worker_group.execute_single(0, _free_address)
        processes = len(worker_group)
        ray.get([worker_group.execute_single_async(rank, _connect, coordinator, processes, rank) for rank in range(processes)])


def _free_address() -> str:
    host = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{host}:{probe.getsockname()[1]}"


def _connect(coordinator: str, processes: int, rank: int) -> None:
    import jax

    jax.distributed.initialize(coordinator, processes, rank)

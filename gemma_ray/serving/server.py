"""What runs inside the Serve replicas: the engine's server and the front door.

Only replicas and `deployment.build_application` import this module: it pulls in vLLM. It changes Ray Serve LLM in four places: no
model-download task, no telemetry actor, the CPU worker inside the engine process (these three are 30 of the 107 s of CPU that two
models take to start), and a failed start that names its cause.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from fastapi import HTTPException
from ray.llm._internal.common.callbacks.base import CallbackBase
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.serve.llm.deployment import LLMServer
from ray.serve.llm.ingress import OpenAiIngress

from gemma_ray.serving.failures import FAILED_START, failure_cause

log_of_replicas = logging.getLogger("ray.serve")
"""The logger that Serve points at the replica's stderr and its own log file."""


class LocalFiles(CallbackBase):
    """The model is a folder that every replica sees, so the task that downloads it to each node (one more vLLM import) is left out."""

    async def on_before_node_init(self) -> None:
        self.ctx.run_init_node = False


class CpuEngine(VLLMEngine):
    """vLLM on CPU with the worker inside the engine process when one worker is enough.

    vLLM gives a CPU worker a process of its own so that it can bind OpenMP threads to cores. Here threads are counted, not bound (see
    `deployment.cpu_environment`), and a third process would cost one more import of vLLM and 0.7 GB a replica.
    """

    def _prepare_engine_config(self, callback_ctx: Any) -> Any:
        engine_args, frontend_args, engine_config = super()._prepare_engine_config(callback_ctx)
        if engine_config.parallel_config.world_size == 1:
            engine_config.parallel_config.distributed_executor_backend = "uni"
        return engine_args, frontend_args, engine_config


class ModelServer(LLMServer):
    """LLMServer whose failed start says why."""

    async def _start_engine(self) -> None:
        # Upstream's method also pushes a usage report through a detached actor, and the replica is not ready until that actor has started
        # (5 s).
        try:
            await self.engine.start()  # pyright: ignore[reportOptionalMemberAccess]
        except Exception as e:
            log_of_replicas.exception("the engine did not start")
            cause, log = failure_cause(e, _log_files())
            raise RuntimeError(f"{FAILED_START}{cause} (log: {log})") from e


class CpuModelServer(ModelServer):
    """ModelServer on `CpuEngine`."""

    _default_engine_cls = CpuEngine


class FrontDoor(OpenAiIngress):
    """OpenAiIngress with `/health`: 200 when every model's engine answers, 503 naming the one that does not."""

    health_timeout_s = 10.0

    async def health(self) -> dict[str, str]:
        async def check(model: str) -> None:
            try:
                await asyncio.wait_for(self._default_serve_handles[model].check_health.remote(), self.health_timeout_s)
            except Exception as e:
                raise HTTPException(503, f"model '{model}' does not answer: {type(e).__name__}") from e

        await asyncio.gather(*(check(model) for model in self._default_serve_handles))
        return {"status": "ok"}


def _log_files() -> list[Path]:
    """The files that this replica and its children write to: vLLM logs to stdout, tracebacks of dying processes go to stderr."""
    from ray._private.worker import global_worker

    paths = (global_worker.get_out_file_path(), global_worker.get_err_file_path())
    return [Path(path) for path in paths if path]

"""The recipe's `serve` section."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gemma_ray.section import Section


class ServeConfig(Section):
    """The OpenAI-compatible endpoint. `engine` passes through to vLLM's engine arguments."""

    port: int = Field(default=8000, ge=1, le=65535)
    host: str = "127.0.0.1"
    accelerator: Literal["cpu", "gpu", "tpu"] = "cpu"
    topology: str | None = Field(default=None, description="TPU topology of one replica, such as 2x4")
    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(default=1, ge=1)
    max_model_len: int = Field(default=16384, ge=1, description="tokens, prompt and answer together")
    cpus_per_replica: float = Field(default=1.0, gt=0)
    ready_timeout_s: float = Field(default=1200.0, gt=0)
    engine: dict[str, Any] = Field(default_factory=dict)

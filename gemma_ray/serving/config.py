"""The recipe's `serve` section."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from gemma_ray.section import Seconds, Section


class ServeConfig(Section):
    """The OpenAI-compatible endpoint. `engine` passes through to vLLM's engine arguments, over the defaults of
    `deployment.ACCELERATORS`.
    """

    port: int = Field(default=8000, ge=1, le=65535)
    host: str = Field(default="127.0.0.1", description="address to listen on; 0.0.0.0 lets other machines in")
    accelerator: Literal["cpu", "gpu", "tpu"] = "cpu"
    accelerator_type: str | None = Field(default=None, description="Ray's name of the accelerator, such as TPU-V6E or H100; null = any")
    topology: str | None = Field(default=None, pattern=r"^\d+(x\d+){1,2}$", description="TPU topology of one replica, such as 2x4")
    min_replicas: int = Field(default=1, ge=0, description="of each model; 0 = scale to zero")
    max_replicas: int = Field(default=1, ge=1, description="of each model")
    target_ongoing_requests: float = Field(default=32.0, gt=0, description="requests in flight at which a replica gets company")
    max_model_len: int = Field(default=16384, ge=1, description="tokens, prompt and answer together")
    cpus_per_replica: float = Field(default=1.0, gt=0, description="logical CPUs that a replica claims from Ray")
    ready_timeout_s: Seconds = 1200.0
    engine: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_together(self) -> ServeConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas = {self.min_replicas} is more than max_replicas = {self.max_replicas}")
        if self.topology and self.accelerator != "tpu":
            raise ValueError(f"topology is for accelerator: tpu, not {self.accelerator}")
        if self.topology and not self.accelerator_type:
            raise ValueError("topology needs accelerator_type, such as TPU-V6E")
        if self.accelerator_type and self.accelerator == "cpu":
            raise ValueError("accelerator_type is for accelerator: gpu or tpu")
        return self

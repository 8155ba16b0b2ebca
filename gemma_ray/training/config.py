"""The recipe's `lora`, `train` and `mesh` sections."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from gemma_ray.section import Section, Seed

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Remat = Literal["none", "norms", "elementwise", "layer"]


class LoraConfig(Section):
    """Which projections get an adapter, and how large. Names are Hugging Face's, as in PEFT."""

    rank: int = Field(default=64, ge=1, le=16_384)
    alpha: float = Field(default=64.0, gt=0)
    targets: tuple[str, ...] = TARGETS

    @field_validator("targets")
    @classmethod
    def _known(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if not targets:
            raise ValueError(f"no target named; choose from {', '.join(TARGETS)}")
        for name in targets:
            if name not in TARGETS:
                raise ValueError(f"'{name}' is not a projection; choose from {', '.join(TARGETS)}")
        if ("k_proj" in targets) != ("v_proj" in targets):
            raise ValueError("k_proj and v_proj share one fused parameter in the trainer; name both or neither")
        return targets


class TrainConfig(Section):
    """The optimizer, its schedule, and what is saved."""

    engine: Literal["jax", "torch"] = Field(default="jax", description="Tunix, or TRL with PEFT and FSDP (GPU, CPU)")
    mode: Literal["lora", "full"] = "lora"
    steps: int = Field(default=1244, ge=1, le=2**31 - 1, description="optimizer steps")
    batch_size: int = Field(default=8, ge=1, le=1_000_000, description="sequences a step, over all devices")
    learning_rate: float = Field(default=1e-4, gt=0, description="peak")
    warmup_steps: int = Field(default=100, ge=0)
    weight_decay: float = Field(default=0.001, ge=0)
    clip_norm: float | None = Field(default=None, gt=0, description="clip the global gradient norm; off when null")
    checkpoint_every: int = Field(default=100, ge=1, description="steps")
    keep_checkpoints: int = Field(default=3, ge=1)
    micro_batches: int = Field(default=1, ge=1, description="parts of a batch that go one after another; same result, less memory")
    remat: Remat = Field(
        default="none",
        description="what the backward pass computes again: nothing, norms and rotations, all but matrix products, or whole layers",
    )
    attention: Literal["auto", "dot", "splash"] = Field(
        default="auto", description="auto = splash on TPU for rows and heads of multiples of 128, else dot"
    )
    splash_block: int | None = Field(
        default=None,
        ge=128,
        le=8192,
        multiple_of=128,
        description="positions a block of splash attention; null = the largest known to fit",
    )
    seed: Seed = 0

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> TrainConfig:
        if self.batch_size % self.micro_batches:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of micro_batches {self.micro_batches}")
        return self

    @property
    def micro_batch_size(self) -> int:
        """Rows that the model sees at once."""
        return self.batch_size // self.micro_batches


class MeshConfig(Section):
    """The device mesh: `fsdp` shards the batch and the parameters, `tp` the heads and the hidden dimension."""

    fsdp: int = Field(default=1, ge=1, le=65_536)
    tp: int = Field(default=1, ge=1, le=65_536)

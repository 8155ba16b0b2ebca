"""The recipe's `lora`, `train` and `mesh` sections."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_validator, model_validator

from gemma_ray.section import Section, Seed

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("q_einsum", "kv_einsum", "k_einsum", "attn_vec_einsum")
"""Tunix's names of the attention's projections; those of the MLP are Hugging Face's."""

Remat = Literal["none", "norms", "elementwise", "layer"]


class LoraConfig(Section):
    """Which projections get an adapter, and how large. Names are Hugging Face's, as in PEFT, or Tunix's, in which k_proj and v_proj are
    kv_einsum, or k_einsum where V is K; `gemma-ray train` says which layers each reaches."""

    rank: int = Field(default=64, ge=1, le=16_384)
    alpha: float = Field(default=64.0, gt=0)
    rslora: bool = Field(default=False, description="scale updates by alpha / sqrt(rank) instead of alpha / rank (arXiv 2312.03732)")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of an adapter's inputs that is zeroed in a training step")
    targets: tuple[str, ...] = TARGETS

    @field_validator("targets")
    @classmethod
    def _known(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if not targets:
            raise ValueError(f"no target named; choose from {', '.join(TARGETS)}")
        for name in targets:
            if name not in (*TARGETS, *FUSED):
                raise ValueError(f"'{name}' is not a projection; choose from {', '.join(TARGETS)}, or Tunix's {', '.join(FUSED)}")
        if ("k_proj" in targets) != ("v_proj" in targets):
            raise ValueError("k_proj and v_proj share one fused parameter in the trainer; name both or neither")
        return targets

    @property
    def scale(self) -> float:
        """What A·B is multiplied by before it is added to a weight."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class TrainConfig(Section):
    """The optimizer, its schedule, and what is saved."""

    engine: Literal["jax", "torch"] = Field(default="jax", description="Tunix, or TRL with PEFT and FSDP (GPU, CPU)")
    mode: Literal["lora", "full"] = "lora"
    steps: int = Field(default=1244, ge=1, le=2**31 - 1, description="optimizer steps")
    batch_size: int = Field(default=8, ge=1, le=1_000_000, description="sequences a step, over all devices")
    optimizer: Literal["adamw", "sgd"] = Field(default="adamw", description="a row of `gemma_ray.training.optimizer.OPTIMIZERS`")
    learning_rate: float = Field(default=1e-4, gt=0, description="peak")
    schedule: Literal["cosine", "linear", "constant"] = Field(default="cosine", description="from the peak to 0, or not, after the warm-up")
    warmup_steps: int = Field(default=100, ge=0)
    decay_steps: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="the step at which the schedule ends, steps or later; null = steps"
    )
    weight_decay: float = Field(default=0.001, ge=0)
    clip_norm: float | None = Field(default=None, gt=0, description="clip the global gradient norm; off when null")
    checkpoint_every: int = Field(default=100, ge=1, description="steps")
    keep_checkpoints: int = Field(default=3, ge=1, description="the newest; the one with the least evaluation loss is kept besides")
    eval_batches: int = Field(default=0, ge=0, le=1_000_000, description="batches of rows that are held out of training, for its loss")
    eval_every: int = Field(default=100, ge=1, description="steps between evaluations; each checkpoint is evaluated too")
    early_stopping: int | None = Field(
        default=None, ge=1, description="evaluations without a lower loss after which training ends; null = never"
    )
    spike: float | None = Field(
        default=10.0, gt=1, description="a loss so many times the median of the last 50 steps is a spike; null = only nan and infinity are"
    )
    bad_batch: Literal["stop", "skip"] = Field(
        default="stop",
        description="what a spike or a loss that is not finite does: end training, or leave the weights as they are and go on",
    )
    tensorboard: bool = Field(default=True, description="write RUN/tensorboard")
    wandb_project: str | None = Field(default=None, description="log to this Weights & Biases project too; needs `pip install wandb`")
    profile_steps: int = Field(default=0, ge=0, le=1000, description="steps to trace into RUN/profile (jax.profiler)")
    profile_after: int = Field(default=10, ge=0, description="steps of a start before the trace begins")
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

    @model_validator(mode="after")
    def _schedule_lasts(self) -> TrainConfig:
        if self.decay_steps is not None and self.decay_steps < self.steps:
            raise ValueError(
                f"decay_steps {self.decay_steps} ends before steps {self.steps}: the rest would train at a rate of 0. "
                "Raise decay_steps, lower steps, or leave decay_steps out"
            )
        if self.early_stopping is not None and not self.eval_batches:
            raise ValueError("early_stopping looks at the evaluation loss, and eval_batches is 0; set eval_batches")
        return self

    @property
    def micro_batch_size(self) -> int:
        """Rows that the model sees at once."""
        return self.batch_size // self.micro_batches


class MeshConfig(Section):
    """The device mesh: `fsdp` shards the batch and the parameters, `tp` the heads and the hidden dimension."""

    fsdp: int = Field(default=1, ge=1, le=65_536)
    tp: int = Field(default=1, ge=1, le=65_536)

"""`gemma-ray plan`: what a recipe would need and do on its hardware, before anybody pays for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemma_ray.errors import CompileError, GemmaRayError
from gemma_ray.models.config import DTYPE_BYTES
from gemma_ray.planning.compiler import compiled
from gemma_ray.planning.config import PlanConfig
from gemma_ray.planning.hardware import Chip, chip, why_not_described
from gemma_ray.planning.job import CompileJob
from gemma_ray.planning.replica import ReplicaPlan
from gemma_ray.planning.sizes import (
    TrainFlops,
    attention_flops_per_token,
    forward_flops_per_token,
    kv_bytes_per_sequence,
    lora_parameters,
    parameter_counts,
    train_flops,
)
from gemma_ray.planning.train import TrainPlan, assumptions, plan_training
from gemma_ray.training.config import LoraConfig, MeshConfig, TrainConfig
from gemma_ray.training.sharding import check_mesh, working_meshes


@dataclass(frozen=True)
class Hardware:
    """The devices that a recipe names. `topology` and `pod_type` are of TPUs alone."""

    accelerator: str
    topology: str | None
    pod_type: str | None
    devices: int


@dataclass(frozen=True)
class Arithmetic:
    """What follows from the sizes alone. FLOPs are of one token, `kv_bytes` of one sequence on one device."""

    base_parameters: int
    trained_parameters: int
    state_bytes: float
    """Base weights, and fp32 trained ones with AdamW's two moments, on one device if all were cut evenly; activations come on top."""
    compute_floor_hours: float | None
    """Of `train.steps` at the peak of all devices, no step being faster; None for a CPU, of which no figures are known."""
    forward_flops: float
    train_flops: TrainFlops
    attention_flops: float
    """Of `forward_flops` apart: scores and mixtures of a row that is one document."""
    kv_bytes: dict[int, float]
    """By tokens of the sequence."""


@dataclass(frozen=True)
class Plan:
    """A prediction. `train` is None where nothing could be compiled, and `why_not` says why; `serve` where no accelerator serves."""

    model: str
    hardware: Hardware
    mesh: MeshConfig
    meshes_that_work: tuple[tuple[int, int], ...]
    arithmetic: Arithmetic
    train: TrainPlan | None
    why_not: str | None
    stopped_by: GemmaRayError | None = None
    """Why it was tried and came to nothing: it does not compile, or the compiler cannot be had."""
    serve: ReplicaPlan | None = None
    assumptions: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The content of plan.json: the training plan's figures at the top level, a prediction and named as one."""
        unknown = ("fits", "device_bytes", "hbm_bytes", "predicted_tokens_per_s", "predicted_hours", "predicted_cost_usd")
        train: dict[str, Any] = self.train.to_json() if self.train else dict.fromkeys(unknown)
        return {
            "prediction": True,
            "model": self.model,
            "hardware": dataclasses.asdict(self.hardware),
            "mesh": self.mesh.model_dump(),
            "meshes_that_work": [{"fsdp": f, "tp": t} for f, t in self.meshes_that_work],
            "arithmetic": dataclasses.asdict(self.arithmetic),
            "compiled": self.train is not None,
            "why_not": self.why_not,
            **train,
            **({"fits": False} if isinstance(self.stopped_by, CompileError) else {}),
            "serve": self.serve.to_json() if self.serve else None,
            "assumptions": self.assumptions,
        }


CONTEXTS = (512, 1024, 4096, 8192, 16_384)
KV_BYTES = 2.0
"""Of a key or value, bfloat16."""


def make_plan(
    model: str,
    text: dict[str, Any],
    hardware: Hardware,
    mesh: MeshConfig,
    train: TrainConfig,
    lora: LoraConfig,
    dtype: str,
    length: int,
    config: PlanConfig,
    usd_per_hour: float | None,
    cache: Path,
    progress: Callable[[str], None],
) -> Plan:
    """The plan of a training recipe. `text` is config.json's text part, `length` tokens a row.

    A step that does not compile for the slice is part of the answer, and so is a compiler that cannot be had (`Plan.stopped_by`). Raises
    RecipeError when the mesh does not divide the model.
    """
    check_mesh(text, train.micro_batch_size, mesh.fsdp, mesh.tp)
    row = chip(hardware.accelerator, config.hardware) if hardware.accelerator != "cpu" else None
    base, is_lora = parameter_counts(text).total, train.mode == "lora"
    trained = lora_parameters(text, lora.rank, lora.targets) if is_lora else base
    a_token = train_flops(text, length, train.remat, lora.rank if is_lora else None, lora.targets)
    rate = None if row is None else row.bf16_flops * hardware.devices
    width = DTYPE_BYTES[dtype]
    arithmetic = Arithmetic(
        base_parameters=base,
        trained_parameters=trained,
        state_bytes=(base * width + trained * 12 if is_lora else base * width * 3) / hardware.devices,
        compute_floor_hours=None if rate is None else train.steps * train.batch_size * length * a_token.total / rate / 3600,
        forward_flops=forward_flops_per_token(text),
        train_flops=a_token,
        attention_flops=attention_flops_per_token(text, length),
        kv_bytes={n: kv_bytes_per_sequence(text, n, KV_BYTES, mesh.tp) for n in CONTEXTS},
    )
    works = tuple(working_meshes(text, train.micro_batch_size, hardware.devices))
    plan = Plan(model, hardware, mesh, works, arithmetic, None, why_not_compiled(text, hardware))
    if plan.why_not is not None or row is None:
        return plan
    job = training_job(text, hardware, mesh, train, lora, dtype, length)
    try:
        found = compiled(job, str(hardware.pod_type), cache, progress)
    except GemmaRayError as e:
        return dataclasses.replace(plan, why_not=str(e), stopped_by=e)
    price = hourly_price(usd_per_hour, row, hardware.devices)
    predicted = plan_training(job, found, row, train.steps, price, config.attention_efficiency)
    named = assumptions(job, row, config.attention_efficiency)
    if price is not None:
        named["price"] = (
            f"{price:.2f} USD an hour for all devices ({'cost.usd_per_hour' if usd_per_hour is not None else row.price_source})"
        )
    return dataclasses.replace(plan, train=predicted, assumptions=named)


def training_job(
    text: dict[str, Any], hardware: Hardware, mesh: MeshConfig, train: TrainConfig, lora: LoraConfig, dtype: str, length: int
) -> CompileJob:
    """The step of a training recipe on TPUs, to be compiled."""
    return CompileJob(
        text=text,
        accelerator=hardware.accelerator,
        topology=str(hardware.topology),
        fsdp=mesh.fsdp,
        tp=mesh.tp,
        dtype=dtype,
        mode=train.mode,
        rank=lora.rank,
        alpha=lora.alpha,
        targets=lora.targets,
        batch_size=train.batch_size,
        micro_batches=train.micro_batches,
        length=length,
        remat=train.remat,
        attention=train.attention,
        clip=train.clip_norm is not None,
        splash_block=train.splash_block,
        dropout=lora.dropout,
        optimizer=train.optimizer,
    )


def why_not_compiled(text: dict[str, Any], hardware: Hardware) -> str | None:
    """Why the training step of a model cannot be compiled for some hardware; None when it can."""
    if why := why_not_described(hardware.accelerator, hardware.topology):
        return why
    if text.get("enable_moe_block"):
        return "nothing was compiled: the planner does not compile the training step of a mixture of experts"
    return None


def hourly_price(given: float | None, row: Chip, devices: int) -> float | None:
    """US dollars an hour of so many chips: the given price, else the public one where it is known."""
    if given is not None:
        return given
    return None if row.usd_per_hour is None else row.usd_per_hour * devices

"""`gemma-ray plan`: what a recipe would need and do on its hardware, before anybody pays for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemma_ray.planning.compiler import compiled
from gemma_ray.planning.config import PlanConfig
from gemma_ray.planning.hardware import Chip, chip
from gemma_ray.planning.job import CompileJob
from gemma_ray.planning.sizes import attention_flops_per_token, forward_flops_per_token, kv_bytes_per_sequence, train_flops_per_token
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
    """What follows from the sizes alone. FLOPs are of one token, bytes of one sequence on one device."""

    forward_flops: float
    train_flops: float
    attention_flops: float
    kv_bytes: dict[int, float]
    """By tokens of the sequence."""


@dataclass(frozen=True)
class Plan:
    """A prediction. `train` is None where nothing could be compiled, and `why_not` says why."""

    model: str
    hardware: Hardware
    mesh: MeshConfig
    meshes_that_work: tuple[tuple[int, int], ...]
    arithmetic: Arithmetic
    train: TrainPlan | None
    why_not: str | None
    assumptions: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The content of plan.json: the training plan's figures at the top level, a prediction and named as one."""
        train = self.train.to_json() if self.train else {}
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
            "assumptions": self.assumptions,
        }


CONTEXTS = (512, 1024, 4096, 8192, 16_384)


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

    Raises RecipeError when the mesh does not divide the model, or the step does not compile for the slice.
    """
    check_mesh(text, train.micro_batch_size, mesh.fsdp, mesh.tp)
    arithmetic = Arithmetic(
        forward_flops=forward_flops_per_token(text),
        train_flops=train_flops_per_token(text, train.remat),
        attention_flops=attention_flops_per_token(text, length),
        kv_bytes={n: kv_bytes_per_sequence(text, n, config.kv_bytes, mesh.tp) for n in CONTEXTS},
    )
    works = tuple(working_meshes(text, train.micro_batch_size, hardware.devices))
    plan = Plan(model, hardware, mesh, works, arithmetic, None, _why_not(text, hardware))
    if plan.why_not is not None:
        return plan
    row = chip(hardware.accelerator, config.hardware)
    job = CompileJob(
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
    )
    found = compiled(job, str(hardware.pod_type), cache, progress)
    price = usd_per_hour if usd_per_hour is not None else _list_price(row, hardware.devices)
    predicted = plan_training(job, found, row, train.steps, price, config.attention_efficiency)
    named = assumptions(job, row, config.attention_efficiency)
    if price is not None:
        named["price"] = (
            f"{price:.2f} USD an hour for all devices ({'cost.usd_per_hour' if usd_per_hour is not None else row.price_source})"
        )
    return dataclasses.replace(plan, train=predicted, assumptions=named)


def _why_not(text: dict[str, Any], hardware: Hardware) -> str | None:
    if hardware.topology is None:
        return f"nothing was compiled: {hardware.accelerator} is no TPU, and only TPUs can be compiled for without one"
    if text.get("enable_moe_block"):
        return "nothing was compiled: the training step of a mixture of experts is not supported"
    return None


def _list_price(row: Chip, devices: int) -> float | None:
    return None if row.usd_per_hour is None else row.usd_per_hour * devices

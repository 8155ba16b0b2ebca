"""What the PyTorch trainer is told, what of a recipe it can do, and whose checkpoints are whose: no import of PyTorch or JAX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gemma_ray.errors import CheckpointError, RecipeError
from gemma_ray.training.config import MeshConfig, TrainConfig
from gemma_ray.training.job import Job


@dataclass(frozen=True)
class TorchJob(Job):
    """A `Job` for PyTorch."""

    initial_adapter: Path | None = None
    """A folder with a PEFT adapter to begin with, in place of a fresh one."""


@dataclass(frozen=True)
class TorchResult:
    """How training ended: the last step, its loss in nats, and the step this start resumed from (0 for none)."""

    step: int
    loss: float
    resumed_from: int


def check_torch(train: TrainConfig, mesh: MeshConfig, devices: int) -> None:
    """Raise RecipeError naming the first key that `train.engine = torch` cannot follow on so many devices."""
    if mesh.tp != 1:
        raise RecipeError(f"mesh.tp = {mesh.tp}: train.engine=torch shards with FSDP alone; set mesh.tp=1 and mesh.fsdp={devices}")
    if mesh.fsdp != devices:
        raise RecipeError(f"mesh.fsdp = {mesh.fsdp}: train.engine=torch runs one process on each of {devices} devices; set it to {devices}")
    parts = train.micro_batches * devices
    if train.batch_size % parts:
        raise RecipeError(
            f"train.batch_size = {train.batch_size} does not divide over train.micro_batches = {train.micro_batches} x {devices} devices; "
            f"set it to a multiple of {parts}"
        )
    if train.mode != "lora":
        raise RecipeError(f"train.mode = {train.mode}: train.engine=torch trains adapters; set train.mode=lora, or train.engine=jax")
    if train.eval_batches:
        raise RecipeError(f"train.eval_batches = {train.eval_batches}: train.engine=torch does not evaluate; set it to 0")
    if train.optimizer != "adamw":
        raise RecipeError(f"train.optimizer = {train.optimizer}: train.engine=torch has adamw alone; set it to that")
    if train.remat not in ("none", "layer"):
        raise RecipeError(
            f"train.remat = {train.remat}: train.engine=torch computes whole layers again or nothing; set it to layer or none"
        )
    if train.attention == "splash":
        raise RecipeError("train.attention = splash is a TPU kernel; with train.engine=torch set it to auto")


def check_same_engine(checkpoint: Path, engine: str) -> None:
    """Raise CheckpointError when the other engine wrote a checkpoint; one that shows neither's files is left to what reads it."""
    marks = {"jax": "_CHECKPOINT_METADATA", "torch": "adapter_config.json"}
    found = next((name for name, file in marks.items() if (checkpoint / file).is_file()), engine)
    if found != engine:
        raise CheckpointError(
            f"{checkpoint}: trained with train.engine={found}, and the recipe says {engine}; "
            f"set another run.dir or remove {checkpoint.parent}"
        )

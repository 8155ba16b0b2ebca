"""What any trainer needs to know. Imports no engine, so that a driver can make one for either."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma_ray.training.config import LoraConfig, MeshConfig, TrainConfig


@dataclass(frozen=True)
class Job:
    """Everything that a process of any engine needs to train. Paths must be visible from every host."""

    model: Path
    data: Path
    out: Path
    """Folder of `checkpoints/`, `metrics.jsonl`, `tensorboard/` and `profile/`."""
    dtype: str
    seq_len: int
    mesh: MeshConfig
    train: TrainConfig
    lora: LoraConfig
    made_from: dict[str, Any]
    """What determines the result, by key; a checkpoint with another is refused."""

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.out / "metrics.jsonl"

"""The SPMD training loop: what every process of the mesh runs, and what it is told and tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from gemma_ray.models.attention import pick_kernel
from gemma_ray.models.gemma4 import read_text_config
from gemma_ray.training.build import build_model
from gemma_ray.training.checkpoints import check_continuable
from gemma_ray.training.job import Job
from gemma_ray.training.sharding import make_mesh
from gemma_ray.training.trainer import Trainer

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrainJob(Job):
    """A `Job` for JAX."""

    slices: int = 1
    """Copies of the mesh, each on a slice of its own and with its share of the batch."""
    flops_per_token: float | None = None
    """What a useful token needs by formula, for MFU."""
    peak_flops: float | None = None
    """Of all devices together, a second; None where it is not known."""
    compile_cache: Path | None = None
    """Folder that XLA's programs are kept in, so that a restart does not compile again what took minutes."""


@dataclass(frozen=True)
class TrainResult:
    """How training ended: the last step, its loss in nats, the step this start resumed from (0 for none), and whether it stopped early."""

    step: int
    loss: float
    resumed_from: int
    stopped_early: bool = False


def train(job: TrainJob, report: Report) -> TrainResult:
    """Train to `job.train.steps`, from the newest whole checkpoint when there is one; call it in every process with the same job.

    `report` is called on process 0 with a dictionary: `note`, a line for people; or `step`, `steps`, `loss`, `tokens_per_s`.

    Raises CheckpointError when the checkpoint belongs to another recipe or is past `job.train.steps`, none can be read or one cannot be
    written; StageError for a bad batch (`train.bad_batch`) or when processes disagree on the data; PreemptedError after a save that was
    asked for by SIGTERM.
    """
    check_continuable(job.checkpoints, job.made_from, job.train.steps)
    if job.compile_cache:
        jax.config.update("jax_compilation_cache_dir", str(job.compile_cache))
    mesh = make_mesh(job.mesh.fsdp, job.mesh.tp, job.slices)
    adapter = job.lora if job.train.mode == "lora" else None
    with mesh:
        kernel = pick_kernel(job.train.attention, mesh.devices.flat[0].platform, job.seq_len, read_text_config(job.model))
        t = job.train
        model = build_model(job.model, mesh, job.dtype, adapter, t.seed, t.remat, kernel, t.splash_block)
        trainer = Trainer(model, job, mesh, report)
        if trainer.train_steps < job.train.steps and not trainer.patience.is_over:
            trainer.train(())
        else:
            trainer.checkpoint_manager.close()
    return TrainResult(trainer.train_steps, trainer.last_loss, trainer.resumed_from, trainer.patience.is_over)

"""Joins the training loop to the slice: one process a host runs `gemma_ray.training.loop.train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gemma_ray.recipe import Recipe
from gemma_ray.training.checkpoints import latest_step
from gemma_ray.training.config import TrainConfig
from raycluster.slices import Slice
from raycluster.trainer import run_spmd, send_report
from workloads.progress import Progress

RESTARTS = 3


def train_on(
    hardware: Slice,
    recipe: Recipe,
    model: Path,
    data: Path,
    out: Path,
    settings: TrainConfig,
    seq_len: int,
    made_from: dict[str, Any],
    progress: Progress,
    name: str,
) -> dict[str, Any]:
    """Train on the slice into `out`, from the newest checkpoint there; returns TrainResult's fields."""
    job = {
        "model": model.absolute(),
        "data": data.absolute(),
        "out": out.absolute(),
        "dtype": recipe.model.dtype,
        "seq_len": seq_len,
        "mesh": recipe.mesh,
        "train": settings,
        "lora": recipe.lora,
        "made_from": made_from,
    }

    def show(report: dict[str, Any]) -> None:
        if "note" in report:
            progress.note(f"   {report['note']}")
            return
        mfu = f"  {report['mfu']:.1%} MFU" if report["mfu"] is not None else ""
        note = f"loss {report['loss']:.3f}  {report['tokens_per_s']:,.0f} tokens/s{mfu}"
        progress.update(report["step"], report["steps"], "steps", note)

    done = latest_step(out / "checkpoints")
    if done:
        progress.note(f"   continuing from step {done} ({out / 'checkpoints'})")
    progress.note(f"   starting {hardware.hosts} JAX process(es) × {hardware.devices_per_host} device(s)")
    return run_spmd(train_worker, job, hardware, name=name, storage=out / ".ray", max_failures=RESTARTS, on_report=show)


def train_worker(job: dict[str, Any]) -> dict[str, Any]:
    """What each process of the mesh runs."""
    import dataclasses

    from gemma_ray.training.loop import TrainJob, train

    return dataclasses.asdict(train(TrainJob(**job), send_report))

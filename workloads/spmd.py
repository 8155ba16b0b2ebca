"""Joins the training loops to the slice: one JAX process a host, or one PyTorch process a device, as `train.engine` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gemma_ray.errors import ToolError
from gemma_ray.recipe import Recipe
from gemma_ray.training.checkpoints import latest_step
from gemma_ray.training.config import TrainConfig
from gemma_ray.training.torch_job import check_same_engine
from raycluster.slices import Slice
from raycluster.torch_trainer import run_torch
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
    made_from: str,
    progress: Progress,
    name: str,
) -> dict[str, Any]:
    """Train on the slice with `settings.engine` into `out`, from the newest checkpoint there; returns TrainResult's fields."""
    job = {
        "model": model.absolute(),
        "data": data.absolute(),
        "checkpoints": (out / "checkpoints").absolute(),
        "metrics": (out / "metrics.jsonl").absolute(),
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
        note = f"loss {report['loss']:.3f}  {report['tokens_per_s']:,.0f} tokens/s"
        progress.update(report["step"], report["steps"], "steps", note)

    done = latest_step(out / "checkpoints")
    if done:
        check_same_engine(out / "checkpoints" / str(done), settings.engine)
        progress.note(f"   continuing from step {done} ({out / 'checkpoints'})")
    if settings.engine == "torch":
        progress.note(f"   starting {hardware.devices} PyTorch process(es), one a device")
        return run_torch(torch_worker, job, hardware, name=name, storage=out / ".ray", max_failures=RESTARTS, on_report=show)
    progress.note(f"   starting {hardware.hosts} JAX process(es) × {hardware.devices_per_host} device(s)")
    return run_spmd(jax_worker, job, hardware, name=name, storage=out / ".ray", max_failures=RESTARTS, on_report=show)


def jax_worker(job: dict[str, Any]) -> dict[str, Any]:
    """What each process of the mesh runs."""
    import dataclasses

    from gemma_ray.training.loop import TrainJob, train

    return dataclasses.asdict(train(TrainJob(**job), send_report))


def torch_worker(job: dict[str, Any]) -> dict[str, Any]:
    """What each rank runs."""
    import dataclasses

    from gemma_ray.training.torch_job import TorchJob

    try:
        from gemma_ray.training.torch_twin import train_torch
    except ModuleNotFoundError as e:
        raise ToolError(f"train.engine=torch needs {e.name}, which this host lacks; install the project with its gpu extra") from e
    return dataclasses.asdict(train_torch(TorchJob(**job), send_report))

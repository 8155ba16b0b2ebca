"""Joins the training loops to the slice: one JAX process a host, or one PyTorch process a device, as `train.engine` says."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from gemma_ray.data.shards import read_manifest
from gemma_ray.errors import ToolError
from gemma_ray.models.gemma4 import read_text_config
from gemma_ray.planning.hardware import CHIPS
from gemma_ray.planning.sizes import train_flops
from gemma_ray.recipe import Recipe
from gemma_ray.training.checkpoints import check_continuable, latest_step
from gemma_ray.training.config import MeshConfig, TrainConfig
from gemma_ray.training.sharding import mesh_problems
from gemma_ray.training.torch_job import check_same_engine
from raycluster.attempt import jax_trainer
from raycluster.slices import Slice
from raycluster.torch_trainer import torch_trainer
from raycluster.trainer import Limits, run_spmd, send_report
from workloads.progress import Progress
from workloads.stage import smaller_slices

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
    """Train on the slice with `settings.engine` into `out`, from the newest checkpoint there; returns TrainResult's fields."""
    common = {
        "model": model.absolute(),
        "data": data.absolute(),
        "out": out.absolute(),
        "dtype": recipe.model.dtype,
        "seq_len": seq_len,
        "train": settings,
        "lora": recipe.lora,
        "made_from": made_from,
    }

    def job_on(used: Slice) -> dict[str, Any]:
        done = latest_step(out / "checkpoints")
        if done:
            check_same_engine(out / "checkpoints" / str(done), settings.engine)
            check_continuable(out / "checkpoints", made_from, settings.steps)  # the workers too, half a minute later
            progress.note(f"   continuing from step {done} ({out / 'checkpoints'})")
        job = {**common, "mesh": mesh_on(used, recipe.mesh)}
        if on_torch:
            progress.note(f"   starting {used.devices} PyTorch process(es), one a device")
            return job
        progress.note(f"   starting {used.hosts} JAX process(es) × {used.devices_per_host} device(s)")
        cache = (recipe.run.cache_path / "xla").absolute()
        return {**job, "slices": used.slices, "compile_cache": cache, **rates(used, recipe, model, data, settings, seq_len)}

    said: set[str] = set()

    def show(report: dict[str, Any]) -> None:
        if "note" in report:
            if report["note"] not in said:  # a restart has the same tables
                progress.note(textwrap.indent(report["note"], "   "))
            said.add(report["note"])
            return
        mfu = f"  {report['mfu']:.1%} MFU" if report.get("mfu") is not None else ""
        note = f"loss {report['loss']:.3f}  {report['tokens_per_s']:,.0f} tokens/s{mfu}"
        progress.update(report["step"], report["steps"], "steps", note)

    c, on_torch = recipe.cluster, settings.engine == "torch"
    return run_spmd(
        torch_worker if on_torch else jax_worker,
        job_on,
        hardware,
        name=name,
        storage=out / ".ray",
        max_failures=RESTARTS,
        on_report=show,
        on_event=lambda line: progress.note(f"   {line}"),
        smaller=[used for used in smaller_slices(recipe, hardware) if fits(used, recipe.mesh, model, settings.micro_batch_size)],
        limits=Limits(wait_s=c.wait_s, start_s=c.start_s, stall_s=c.stall_s, save_s=c.save_s),
        build=torch_trainer if on_torch else jax_trainer,
    )


def mesh_on(used: Slice, mesh: MeshConfig) -> MeshConfig:
    """The mesh on what is left of the hardware: a lost slice takes its own copy of it along, lost hosts make `fsdp` shorter."""
    return mesh if used.topology else MeshConfig(fsdp=max(1, used.devices // mesh.tp), tp=mesh.tp)


def rates(used: Slice, recipe: Recipe, model: Path, data: Path, settings: TrainConfig, seq_len: int) -> dict[str, float | None]:
    """What MFU is worked out from: FLOPs of a useful token, nothing computed again, and the peak of all devices; None for emulated ones."""
    manifest, chip = read_manifest(data), CHIPS.get(used.accelerator.name)
    documents = max(1, round(sum(shard.examples for shard in manifest.shards) / max(1, manifest.sequences)))
    rank = recipe.lora.rank if settings.mode == "lora" else None
    flops = train_flops(read_text_config(model), seq_len, "none", rank, recipe.lora.targets, min(documents, seq_len)).total
    return {"flops_per_token": flops, "peak_flops": chip.bf16_flops * used.devices if chip and not used.emulate else None}


def fits(used: Slice, mesh: MeshConfig, model: Path, rows: int) -> bool:
    """Whether `mesh_on` covers the hardware, and divides the model and a micro-batch of so many rows."""
    left = mesh_on(used, mesh)
    covers = left.fsdp * left.tp == used.devices_per_slice
    return covers and not mesh_problems(read_text_config(model), rows, left.fsdp, left.tp, used.slices)


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

"""`gemma-ray plan`: the recipe's training step compiled for its TPU without one, into RUN/plan.json;
with `--sweep` variants of it, into RUN/sweep.json."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from gemma_ray.artifacts import write_json
from gemma_ray.errors import ModelError, RecipeError, ToolError
from gemma_ray.models.gemma4 import official_name, read_text_config, text_config
from gemma_ray.planning.hardware import chip
from gemma_ray.planning.plan import Hardware, Plan, hourly_price, make_plan, training_job, why_not_compiled
from gemma_ray.planning.replica import Replica, ReplicaPlan, plan_replica
from gemma_ray.planning.sweep import Sweep, run_sweep
from gemma_ray.recipe import Recipe
from gemma_ray.serving.deployment import engine_arguments
from gemma_ray.training.sharding import check_mesh as check_model_mesh
from raycluster.slices import ACCELERATORS, check_mesh, resolve
from workloads.command import main
from workloads.progress import Progress
from workloads.stage import BUILT_IN, run_paths, slice_of, timed


def run(recipe: Recipe, progress: Progress) -> Plan:
    """Write RUN/plan.json and return the plan. Raises RecipeError when the mesh does not fit."""
    name, text, hardware = _planned(recipe)
    with timed(recipe, "plan", progress):
        (run_paths(recipe).root / "plan.json").unlink(missing_ok=True)  # may be of another recipe
        plan = make_plan(
            name,
            text,
            hardware,
            recipe.mesh,
            recipe.train,
            recipe.lora,
            recipe.model.dtype,
            recipe.data.max_seq_len,
            recipe.plan,
            recipe.cost.usd_per_hour,
            recipe.run.cache_path,
            progress.note,
        )
        no_compiler = str(plan.stopped_by) if isinstance(plan.stopped_by, ToolError) else None
        plan = dataclasses.replace(plan, serve=_serve_plan(recipe, text, progress, no_compiler))
        write_json(run_paths(recipe).root / "plan.json", plan.to_json())
    return plan


def sweep(recipe: Recipe, progress: Progress) -> Sweep:
    """Compare variants of the recipe's training step into RUN/sweep.json.

    Raises RecipeError when the recipe's own mesh does not fit, or nothing can be compiled for its hardware.
    """
    _, text, hardware = _planned(recipe)
    if why := why_not_compiled(text, hardware):
        raise RecipeError(f"--sweep: {why}")
    check_model_mesh(text, recipe.train.micro_batch_size, recipe.mesh.fsdp, recipe.mesh.tp)
    job = training_job(text, hardware, recipe.mesh, recipe.train, recipe.lora, recipe.model.dtype, recipe.data.max_seq_len)
    row = chip(hardware.accelerator, recipe.plan.hardware)
    price = hourly_price(recipe.cost.usd_per_hour, row, hardware.devices)
    with timed(recipe, "sweep", progress):
        (run_paths(recipe).root / "sweep.json").unlink(missing_ok=True)  # may be of another recipe
        limit, efficiency = recipe.plan.sweep_limit_s, recipe.plan.attention_efficiency
        cache, pod_type = recipe.run.cache_path, str(hardware.pod_type)
        found = run_sweep(job, pod_type, row, recipe.train.steps, price, efficiency, limit, cache, progress.note)
        write_json(run_paths(recipe).root / "sweep.json", found.to_json())
    return found


def check(found: Plan | Sweep) -> None:
    """Raise what kept a plan's training step from being compiled; for after the rest of the plan was shown."""
    if isinstance(found, Plan) and found.stopped_by:
        raise found.stopped_by


def _planned(recipe: Recipe) -> tuple[str, dict[str, Any], Hardware]:
    """Model, its config and the hardware. Raises ClusterError when they do not exist or the mesh is of another size, RecipeError for more
    than one slice."""
    slice = slice_of(recipe)
    if slice.slices > 1:
        raise RecipeError(
            f"cluster.slices = {slice.slices}: a plan is of one slice. Plan its share: --set cluster.slices=1 "
            f"--set train.batch_size={max(1, recipe.train.batch_size // slice.slices)}"
        )
    check_mesh(slice, recipe.mesh.fsdp, recipe.mesh.tp)
    name, text = planned_model(recipe.model.source)
    return name, text, Hardware(slice.accelerator.name, slice.topology, slice.pod_type, slice.devices)


def _serve_plan(recipe: Recipe, text: dict[str, Any], progress: Progress, no_compiler: str | None) -> ReplicaPlan | None:
    replica = served_on(recipe)
    if replica is None:
        return None
    serve, cache = recipe.serve.engine, recipe.run.cache_path
    return plan_replica(text, replica, serve, recipe.bench, recipe.plan, cache, progress.note, no_compiler)


def served_on(recipe: Recipe) -> Replica | None:
    """The devices of one replica of the recipe's `serve` section; None for CPUs, of which no figures are known.

    Raises RecipeError when the section does not say what accelerator it is and the cluster's is none of its kind, ClusterError for a
    topology that does not exist.
    """
    serve = recipe.serve
    if serve.accelerator == "cpu":
        return None
    kind = serve.accelerator.upper()
    if serve.accelerator_type is None:
        row = ACCELERATORS[recipe.cluster.accelerator]
        if row.resource != kind:
            raise RecipeError(f"serve.accelerator is {serve.accelerator}, but of what type? Set serve.accelerator_type: {_types(kind)}")
    else:
        found = [row for row in ACCELERATORS.values() if row.ray_type == serve.accelerator_type and row.resource == kind]
        if not found:
            raise RecipeError(f"serve.accelerator_type = '{serve.accelerator_type}': no figures for it. Known: {_types(kind)}")
        row = found[0]
    if serve.topology is None:
        return Replica(row.name, int(engine_arguments(serve).get("tensor_parallel_size", 1)))
    slice = resolve(row.name, serve.topology)
    return Replica(row.name, slice.devices, slice.topology, slice.pod_type)


def _types(resource: str) -> str:
    return ", ".join(str(row.ray_type) for row in ACCELERATORS.values() if row.resource == resource)


def planned_model(source: str) -> tuple[str, dict[str, Any]]:
    """Name and config.json's text part of a recipe's model; of a folder that is not here, the released size that it is named after.

    Raises ModelError when the folder is neither here nor named after one.
    """
    if source.startswith(BUILT_IN):
        preset = source.removeprefix(BUILT_IN)
        return preset, text_config(preset)
    folder = Path(source).expanduser()
    if folder.is_dir():
        return str(folder), read_text_config(folder)
    size = official_name(source)
    if size is None:
        raise ModelError(f"model.source = '{source}': no such folder here, and its name tells no released size (such as gemma-4-31b-it)")
    return f"{size} (for {source}, which is not here)", text_config(size)


if __name__ == "__main__":
    main(lambda recipe, progress: check(run(recipe, progress)))

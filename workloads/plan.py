"""`gemma-ray plan`: the recipe's training step compiled for its TPU without one, into RUN/plan.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gemma_ray.artifacts import write_json
from gemma_ray.errors import ModelError
from gemma_ray.models.gemma4 import official_name, read_text_config, text_config
from gemma_ray.planning.plan import Hardware, Plan, make_plan
from gemma_ray.recipe import Recipe
from raycluster.slices import check_mesh
from workloads.command import main
from workloads.progress import Progress
from workloads.stage import BUILT_IN, run_paths, slice_of, timed


def run(recipe: Recipe, progress: Progress) -> Plan:
    """Write RUN/plan.json and return the plan. Raises RecipeError when the mesh does not fit or the step does not compile."""
    slice = slice_of(recipe)
    check_mesh(slice, recipe.mesh.fsdp, recipe.mesh.tp)
    name, text = planned_model(recipe.model.source)
    hardware = Hardware(slice.accelerator.name, slice.topology, slice.pod_type, slice.devices)
    with timed(recipe, "plan", progress):
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
        write_json(run_paths(recipe).root / "plan.json", plan.to_json())
    return plan


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
    main(run)

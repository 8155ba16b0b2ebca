"""`gemma-ray convert`: the newest checkpoint as Hugging Face files in RUN/model, written by a Ray task."""

from __future__ import annotations

from gemma_ray.conversion.export import export
from gemma_ray.conversion.peft_export import export_peft, is_peft
from gemma_ray.errors import CheckpointError
from gemma_ray.models.fingerprint import model_fingerprint
from gemma_ray.recipe import Recipe
from gemma_ray.training.checkpoints import latest_step
from raycluster.placement import run_task
from workloads.base import base_model
from workloads.command import main
from workloads.progress import Progress
from workloads.stage import cluster, once, run_paths


def run(recipe: Recipe, progress: Progress) -> None:
    """Write RUN/model. Raises CheckpointError when nothing is trained yet."""
    paths = run_paths(recipe)
    step = latest_step(paths.checkpoints)
    if step is None:
        raise CheckpointError(f"{paths.checkpoints}: no checkpoint; run `gemma-ray train` first")
    base = base_model(recipe, progress)
    checkpoint = paths.checkpoints / str(step)
    made_from = [model_fingerprint(base), step, checkpoint.stat().st_mtime_ns, recipe.convert.max_shard_bytes]

    def work() -> None:
        with cluster(recipe):
            write, source = (export_peft, checkpoint) if is_peft(checkpoint) else (export, paths.checkpoints)
            done = run_task(write, base.absolute(), source.absolute(), paths.model.absolute(), recipe.convert, num_cpus=1)
        progress.note(f"   step {done.step}: {done.changed} tensors merged, {done.copied} copied, {done.bytes / 1e6:.1f} MB")

    once(recipe, "convert", made_from, paths.model, work, progress)


if __name__ == "__main__":
    main(run)

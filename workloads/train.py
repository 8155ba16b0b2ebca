"""`gemma-ray train`: supervised fine-tuning on the slice, into RUN/checkpoints and RUN/metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

from gemma_ray.artifacts import fingerprint
from gemma_ray.data.shards import Manifest
from gemma_ray.errors import StageError
from gemma_ray.models.fingerprint import model_fingerprint
from gemma_ray.recipe import Recipe
from gemma_ray.training.metrics import StepMetrics, read_metrics
from workloads import prepare
from workloads.base import base_model
from workloads.command import main
from workloads.progress import Progress
from workloads.spmd import train_on
from workloads.stage import cluster, once, preflight, run_paths

MAY_CHANGE = {"steps", "checkpoint_every", "keep_checkpoints", "micro_batches", "remat", "attention", "splash_block"}
"""Keys of `train` that say how long, how often saved and how computed, and not what is learnt."""


def run(recipe: Recipe, progress: Progress) -> StepMetrics:
    """Train to `train.steps`, preparing the data first when that was not done; returns the last step's metrics."""
    preflight(recipe)
    paths = run_paths(recipe)
    with cluster(recipe) as hardware:
        base = base_model(recipe, progress)
        manifest = prepare.run(recipe, progress)
        made_from = trained_from(recipe, base, manifest)

        def work() -> None:
            train_on(
                hardware, recipe, base, paths.data, paths.root, recipe.train, recipe.data.max_seq_len, made_from, progress, name="train"
            )

        artifact = paths.checkpoints / str(recipe.train.steps)
        once(recipe, "train", [made_from, recipe.train.steps], artifact, work, progress)
    steps = read_metrics(paths.metrics)
    if not steps:
        raise StageError(f"{paths.metrics}: no steps in it, though {artifact} is there; remove {paths.checkpoints} to train anew")
    return steps[-1]


def trained_from(recipe: Recipe, base: Path, manifest: Manifest) -> str:
    """Fingerprint of what the weights follow from. How long, how often saved and on how many devices may change midway."""
    settings = recipe.train.model_dump(mode="json", exclude=MAY_CHANGE)
    return fingerprint([settings, recipe.lora.model_dump(mode="json"), recipe.model.dtype, model_fingerprint(base), manifest.fingerprint()])


if __name__ == "__main__":
    main(run)

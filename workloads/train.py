"""`gemma-ray train`: supervised fine-tuning on the slice, into RUN/checkpoints and RUN/metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

MAY_CHANGE = {
    *("steps", "eval_every", "early_stopping", "spike", "bad_batch"),  # how long
    *("checkpoint_every", "keep_checkpoints", "tensorboard", "wandb_project", "profile_steps", "profile_after"),  # what is written
    *("micro_batches", "remat", "attention", "splash_block"),  # how it is computed
}
"""Keys of `train` that may differ when a run goes on: they do not say what is learnt from a batch. (Without `decay_steps` the schedule
ends at `steps`, so more of them stretch what is left of it.)"""


def run(recipe: Recipe, progress: Progress) -> StepMetrics:
    """Train to `train.steps`, preparing the data first when that was not done; returns the last step's metrics."""
    preflight(recipe)
    paths = run_paths(recipe)
    with cluster(recipe) as hardware:
        base = base_model(recipe, progress)
        manifest = prepare.run(recipe, progress)
        made_from = trained_from(recipe, base, manifest)

        def work() -> None:
            board = f", or `tensorboard --logdir {paths.root / 'tensorboard'}`" if recipe.train.tensorboard else ""
            progress.note(f"   look at {paths.metrics}{board}")
            train_on(
                hardware, recipe, base, paths.data, paths.root, recipe.train, recipe.data.max_seq_len, made_from, progress, name="train"
            )

        ends_by = [recipe.train.steps, recipe.train.early_stopping]
        once(recipe, "train", [made_from, ends_by], paths.checkpoints, work, progress)
    steps = read_metrics(paths.metrics)
    if not steps:
        raise StageError(f"{paths.metrics}: no steps in it, though {paths.checkpoints} is there; remove that to train anew")
    return steps[-1]


def trained_from(recipe: Recipe, base: Path, manifest: Manifest) -> dict[str, Any]:
    """What the weights follow from, by key. How long, how often saved and on how many devices may change midway."""
    train = recipe.train.model_dump(mode="json", exclude=MAY_CHANGE)
    lora = recipe.lora.model_dump(mode="json") if recipe.train.mode == "lora" else {}
    return {
        **{f"train.{key}": value for key, value in train.items()},
        **{f"lora.{key}": value for key, value in lora.items()},
        "model.dtype": recipe.model.dtype,
        "base model": model_fingerprint(base),
        "data": manifest.fingerprint(),
    }


if __name__ == "__main__":
    main(run)

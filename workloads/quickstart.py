"""`gemma-ray quickstart`: the whole road, one stage after another, on one Ray cluster.

Every stage skips itself when its artifact is there and was made from the same inputs, so the same command continues an interrupted run.
"""

from __future__ import annotations

from pathlib import Path

from gemma_ray.errors import ToolError
from gemma_ray.recipe import Recipe
from gemma_ray.serving.application import serve_models
from raycluster.doctor import diagnose
from workloads import bench, convert, eval, report, train, verify
from workloads.command import main
from workloads.endpoint import BASE, TUNED, announced, served_models
from workloads.progress import Progress
from workloads.stage import cluster, preflight, timed


def run(recipe: Recipe, progress: Progress) -> Path:
    """Prepare, train, convert, verify, serve, evaluate the base and the tuned model, benchmark; returns the report's path.

    Raises ToolError before anything starts when the machine lacks what a stage needs.
    """
    preflight(recipe)
    check_machine()
    with cluster(recipe):
        train.run(recipe, progress)
        convert.run(recipe, progress)
        verify.run(recipe, progress)
        if eval.pending(recipe, progress, BASE) or eval.pending(recipe, progress, TUNED) or bench.pending(recipe, progress):
            measure(recipe, progress)
    return report.run(recipe, progress)


def measure(recipe: Recipe, progress: Progress) -> None:
    """Serve both models side by side and put evaluation and benchmark through that endpoint."""
    models = served_models(recipe, progress, (BASE, TUNED))
    with timed(recipe, "serve", progress):
        application = serve_models(models, recipe.serve)
    with application as served, announced(recipe, served):
        eval.run(recipe, progress, of=BASE)
        eval.run(recipe, progress, of=TUNED)
        bench.run(recipe, progress)


def check_machine() -> None:
    """Raise ToolError naming what is missing and the command that installs it."""
    missing = [check for check in diagnose() if check.required and not check.ok]
    if missing:
        raise ToolError("\n".join(f"{check.name}: {check.found}. {check.remedy or ''}".strip() for check in missing))


if __name__ == "__main__":
    main(run)

"""`gemma-ray quickstart`: the whole road, one stage after another, on one Ray cluster.

Every stage skips itself when its artifact is there and was made from the same inputs, so the same command continues an interrupted run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gemma_ray.benchmarking.sweep import read_cells, table
from gemma_ray.errors import ToolError
from gemma_ray.evaluation.evaluate import read_summary
from gemma_ray.recipe import Recipe
from gemma_ray.serving.application import serve_models
from raycluster.doctor import diagnose
from workloads import bench, convert, eval, report, train, verify
from workloads.command import main
from workloads.endpoint import BASE, TUNED, announced, served_models
from workloads.progress import Progress
from workloads.stage import cluster, preflight, run_paths, timed


def run(recipe: Recipe, progress: Progress) -> Path:
    """Prepare, train, convert, verify, serve, evaluate the base and the tuned model, benchmark, report; returns the report's path.

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
        else:
            progress.note("── serve, eval-base, eval, bench: already done")
    return report.run(recipe, progress)


def results(recipe: Recipe) -> str:
    """What a finished quickstart measured, for people."""
    paths = run_paths(recipe)
    before, after = read_summary(paths.eval_base), read_summary(paths.eval)
    lines = ["held-out        before tuning              after"]
    for key in ("pass@1", "pass@5"):
        if before[key] and after[key]:
            lines.append(f"{key:15} {_share(before[key]):26} {_share(after[key])}")
    return "\n".join([*lines, "", table(read_cells(paths.bench))])


def _share(estimate: dict[str, Any]) -> str:
    low, high = estimate["ci95"]
    return f"{estimate['value']:.1%} ({low:.1%} to {high:.1%})"


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

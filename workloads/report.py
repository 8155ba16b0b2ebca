"""`gemma-ray report`: one HTML page over one or several runs."""

from __future__ import annotations

from pathlib import Path

from gemma_ray.recipe import Recipe
from gemma_ray.reporting.page import report
from workloads.command import main
from workloads.progress import Progress
from workloads.stage import run_paths


def run(recipe: Recipe, progress: Progress) -> Path:
    """Write RUN/report.html and return its path."""
    paths = run_paths(recipe)
    with progress.stage("report"):
        return report([paths.root], paths.report)


if __name__ == "__main__":
    main(run)

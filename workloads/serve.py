"""`gemma-ray serve`: the run's model behind an OpenAI-compatible endpoint on Ray Serve, until interrupted."""

from __future__ import annotations

import time

from gemma_ray.recipe import Recipe
from gemma_ray.serving.application import serve_models
from gemma_ray.serving.background import announce
from workloads.command import main
from workloads.endpoint import BASE, TUNED, served_models, state_file
from workloads.progress import Progress
from workloads.stage import cluster, run_paths


def run(recipe: Recipe, progress: Progress, *, names: tuple[str, ...] | None = None) -> None:
    """Serve the tuned model, or the base while none is exported; returns when the application ends."""
    recipe.write(run_paths(recipe).recipe)
    names = names or ((TUNED,) if run_paths(recipe).model.is_dir() else (BASE,))
    models = served_models(recipe, progress, names)
    with cluster(recipe):
        progress.note(f"starting {', '.join(names)} on port {recipe.serve.port}")
        with serve_models(models, recipe.serve) as served, announce(state_file(recipe), served):
            progress.note(f"ready: {served.url}/v1 serves {', '.join(names)}; Ctrl-C ends it")
            while True:
                time.sleep(1)


if __name__ == "__main__":
    main(run)

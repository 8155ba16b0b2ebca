"""`gemma-ray serve`: the run's model behind an OpenAI-compatible endpoint on Ray Serve, until interrupted or in the background."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gemma_ray.recipe import Recipe
from gemma_ray.serving import background
from gemma_ray.serving.application import Endpoint, serve_models
from workloads.command import main
from workloads.endpoint import BASE, TUNED, log_file, served_models, state_file
from workloads.progress import Progress
from workloads.stage import cluster, run_paths


def run(recipe: Recipe, progress: Progress, *, base: bool = False, on_ready: Callable[[Endpoint], None] = lambda served: None) -> None:
    """Serve the tuned model (the base while none is exported, or beside it with `base`); returns after Ctrl-C or SIGTERM.

    Raises ResourceError when this run is being served already.
    """
    background.refuse_second(state_file(recipe))
    if not run_paths(recipe).recipe.exists():
        recipe.write(run_paths(recipe).recipe)
    tuned = (TUNED,) if run_paths(recipe).model.is_dir() else ()
    names = ((BASE,) if base or not tuned else ()) + tuned
    models = served_models(recipe, progress, names)
    with cluster(recipe):
        progress.note(f"starting {', '.join(names)} on port {recipe.serve.port}")
        served = serve_models(models, recipe.serve)
        background.announce(state_file(recipe), served, log_file(recipe))
        progress.note(f"ready: {served.url}/v1 serves {', '.join(names)}; Ctrl-C ends it")
        on_ready(served)
        background.run_until_signal(served.stop, state_file(recipe))


def start(recipe_name: str, overrides: Sequence[str], recipe: Recipe, *, base: bool = False) -> background.Background:
    """Run the same in a process of its own, and return once it is ready. It goes on until `stop`."""
    argv = [sys.executable, "-m", "gemma_ray.cli", "serve", recipe_name, "--blocking", *(["--base"] if base else [])]
    argv += _set(overrides)
    return background.start_detached(argv, state_file(recipe), log_file(recipe), recipe.serve.ready_timeout_s)


def stop_command(recipe_name: str, overrides: Sequence[str]) -> str:
    """What to type to end what `start` started."""
    return shlex.join(["gemma-ray", "serve", recipe_name, *_set(overrides), "--stop"])


def _set(overrides: Sequence[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def stop(recipe: Recipe) -> Path | None:
    """End the run's application; returns its log's path, None when none was running."""
    ended = background.stop(state_file(recipe))
    return Path(ended.log) if ended else None


if __name__ == "__main__":
    main(run)

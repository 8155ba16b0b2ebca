"""The endpoint that evaluation and benchmark talk to: a given URL, the run's own running application, or one started for the while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gemma_ray.data.shards import read_manifest
from gemma_ray.errors import InputError, ModelError
from gemma_ray.models.template_check import check_probes
from gemma_ray.recipe import Recipe
from gemma_ray.serving.application import Endpoint, serve_models
from gemma_ray.serving.background import announce, running, withdraw
from gemma_ray.serving.deployment import ServedModel
from workloads.base import base_model
from workloads.progress import Progress
from workloads.stage import cluster, run_paths

BASE, TUNED = "base", "tuned"
"""Names under which the endpoint serves the two models."""


@dataclass(frozen=True)
class Target:
    """An endpoint's URL, with or without /v1, None for none; and the model to ask for, None = the only one it has."""

    url: str | None
    model: str | None


def state_file(recipe: Recipe) -> Path:
    """Where a run's background application announces itself."""
    return run_paths(recipe).root / "serve.json"


def log_file(recipe: Recipe) -> Path:
    """Where a background application writes."""
    return run_paths(recipe).root / "logs" / "serve.log"


def served_models(recipe: Recipe, progress: Progress, names: tuple[str, ...]) -> list[ServedModel]:
    """The models by name. Raises ModelError when the tuned one is not exported yet, or has another chat template than its training data."""
    models = []
    for name in names:
        folder = run_paths(recipe).model if name == TUNED else base_model(recipe, progress)
        if not folder.is_dir():
            raise ModelError(f"{folder}: no exported model; run `gemma-ray convert` first")
        if name == TUNED and run_paths(recipe).manifest.is_file():
            check_probes(folder, read_manifest(run_paths(recipe).data).probes)
        models.append(ServedModel(name, folder.absolute()))
    return models


def check_url(url: str | None, model: str | None) -> None:
    """Raise InputError for an endpoint that cannot be one, or a model without an endpoint."""
    if url is None:
        if model is not None:
            raise InputError(f"--model {model}: names a model of --url, which is missing")
        return
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
    except ValueError:  # a port that is no number, or above 65535
        good = False
    if not good:
        raise InputError(f"--url '{url}': not an address such as http://127.0.0.1:8000")


@contextmanager
def announced(recipe: Recipe, served: Endpoint) -> Iterator[None]:
    """Let other commands, and the stages of this process, find an endpoint of this run for the time of the block."""
    announce(state_file(recipe), served, log_file(recipe))
    try:
        yield
    finally:
        withdraw(state_file(recipe))


@contextmanager
def endpoint(recipe: Recipe, progress: Progress, name: str, url: str | None = None, model: str | None = None) -> Iterator[Target]:
    """An endpoint that serves the model called `name`; what this starts, it also stops."""
    if url is not None:
        yield Target(url, model)
        return
    found = running(state_file(recipe))
    if found is not None and name in found.models:
        yield Target(found.url, name)
        return
    models = served_models(recipe, progress, (name,))
    with cluster(recipe):
        progress.note(f"   starting an endpoint for {name}")
        with serve_models(models, recipe.serve) as served:
            yield Target(served.url, name)

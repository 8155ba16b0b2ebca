"""`gemma-ray bench`: latency and throughput of an endpoint over context × request rate, into RUN/bench."""

from __future__ import annotations

from typing import Any

from gemma_ray.benchmarking.sweep import Cell, benchmark, read_cells, whole_benchmark
from gemma_ray.models.fingerprint import model_fingerprint
from gemma_ray.models.tokenizer import Tokenizer
from gemma_ray.recipe import Recipe
from workloads.base import base_model
from workloads.command import main
from workloads.endpoint import TUNED, check_url, endpoint, served_models
from workloads.progress import Progress
from workloads.stage import is_done, once, run_paths, timed


def run(recipe: Recipe, progress: Progress, *, url: str | None = None, model: str | None = None) -> list[Cell]:
    """Write RUN/bench/<context>_<qps>.json and return the cells: of the run's own model, or of whatever `url` serves under `model`."""
    check_url(url, model)
    paths = run_paths(recipe)
    made_from = None if url else _made_from(recipe, progress)

    def work() -> None:
        words = Tokenizer(base_model(recipe, progress)).ordinary_ids()
        with endpoint(recipe, progress, TUNED, url, model) as target:
            assert target.url is not None
            benchmark(
                recipe.bench,
                paths.bench,
                url=target.url,
                model=target.model,
                token_ids=words,
                made_from=made_from,
                progress=progress.update,
            )

    if made_from is None:
        with timed(recipe, "bench", progress):
            work()
    else:
        once(recipe, "bench", made_from, paths.bench, work, progress, lambda: whole_benchmark(paths.bench, recipe.bench))
    return read_cells(paths.bench)


def pending(recipe: Recipe, progress: Progress) -> bool:
    """Whether RUN still lacks this benchmark of these very weights."""
    folder = run_paths(recipe).bench
    return not is_done(recipe, "bench", _made_from(recipe, progress), folder, lambda: whole_benchmark(folder, recipe.bench))


def _made_from(recipe: Recipe, progress: Progress) -> list[Any]:
    weights = model_fingerprint(served_models(recipe, progress, (TUNED,))[0].path)
    return [weights, recipe.bench.model_dump(mode="json"), recipe.serve.model_dump(mode="json", exclude={"port", "host"})]


if __name__ == "__main__":
    main(run)

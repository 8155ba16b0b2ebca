"""`gemma-ray eval`: pass@k of the tuned model, or of the base, sampled through an endpoint and graded in Ray tasks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from gemma_ray.artifacts import fingerprint, read_json
from gemma_ray.evaluation.evaluate import GradeMap, evaluate
from gemma_ray.models.fingerprint import model_fingerprint
from gemma_ray.recipe import Recipe
from raycluster.placement import map_tasks
from workloads import prepare
from workloads.command import main
from workloads.endpoint import BASE, TUNED, Target, endpoint, served_models
from workloads.progress import Progress
from workloads.stage import BUILT_IN, is_done, once, run_paths, timed


def run(
    recipe: Recipe,
    progress: Progress,
    *,
    of: str = TUNED,
    samples: Path | None = None,
    url: str | None = None,
    model: str | None = None,
) -> dict[str, Any]:
    """Write RUN/eval (RUN/eval-base for the base model) and return its summary.json.

    The model is the run's own, served for the while unless it already is. With `url` it is whatever that endpoint serves under `model`;
    with `samples` nothing is sampled, only graded.
    """
    out, stage = _place(recipe, of)
    dataset = problems_folder(recipe, progress)
    weights = None if url or samples else _weights(recipe, progress, of)

    def work() -> None:
        with nullcontext(Target(None, None)) if samples else endpoint(recipe, progress, of, url, model) as target:
            evaluate(
                recipe.eval,
                dataset,
                out,
                url=target.url,
                model=target.model,
                made_from=weights,
                samples=samples,
                grade_map=_grade_map(),
                progress=progress.update,
            )

    if weights is None:
        with timed(recipe, stage, progress):
            work()
    else:
        once(recipe, stage, _made_from(recipe, weights, dataset), out, work, progress)
    return read_json(out / "summary.json")


def pending(recipe: Recipe, progress: Progress, of: str) -> bool:
    """Whether RUN still lacks this evaluation of these very weights."""
    out, stage = _place(recipe, of)
    made_from = _made_from(recipe, _weights(recipe, progress, of), problems_folder(recipe, progress))
    return not is_done(recipe, stage, made_from, out)


def problems_folder(recipe: Recipe, progress: Progress) -> Path:
    """`eval.dataset` as a folder; the built-in held-out set is made when the cache lacks it."""
    dataset = recipe.eval.dataset
    return prepare.built_in_data(recipe, progress).heldout if dataset.startswith(BUILT_IN) else Path(dataset).expanduser()


def _place(recipe: Recipe, of: str) -> tuple[Path, str]:
    paths = run_paths(recipe)
    return (paths.eval_base, "eval-base") if of == BASE else (paths.eval, "eval")


def _weights(recipe: Recipe, progress: Progress, of: str) -> str:
    return model_fingerprint(served_models(recipe, progress, (of,))[0].path)


def _made_from(recipe: Recipe, weights: str, dataset: Path) -> list[Any]:
    files = [(path.name, path.stat().st_size) for path in sorted(dataset.glob("*"))]
    return [weights, recipe.eval.model_dump(mode="json"), fingerprint(files)]


def text(summary: dict[str, Any]) -> str:
    """A summary for people, one line a figure."""
    lines = [
        f"{summary['problems']} problems × {summary['samples_per_problem']} samples, {summary['simulator']}, sandbox: {summary['sandbox']}"
    ]
    for key in ("pass@1", "pass@5"):
        if summary[key]:
            low, high = summary[key]["ci95"]
            lines.append(f"{key} {summary[key]['value']:.1%} (95 % interval {low:.1%} to {high:.1%})")
    lines.append("verdicts: " + ", ".join(f"{verdict} {count}" for verdict, count in summary["verdicts"].items()))
    if summary["set_aside"]:
        lines.append("cannot pass here: " + "; ".join(f"{p['task_id']} ({p['reason']})" for p in summary["set_aside"]))
    return "\n".join(lines)


def _grade_map() -> GradeMap | None:
    """Grading spread over the connected cluster; on this machine's processors when there is none."""
    import ray

    return (lambda fn, items: map_tasks(fn, items, num_cpus=1)) if ray.is_initialized() else None


if __name__ == "__main__":
    main(run)

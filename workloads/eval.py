"""`gemma-ray eval`: pass@k of the tuned model, or of the base, sampled through an endpoint and graded in Ray tasks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from gemma_ray.artifacts import fingerprint
from gemma_ray.errors import InputError, ToolError
from gemma_ray.evaluation.benchmarks import find_problem_folder, load_problems
from gemma_ray.evaluation.evaluate import GradeMap, evaluate, read_summary, whole_evaluation
from gemma_ray.evaluation.grading import simulator_version
from gemma_ray.icarus import INSTALL
from gemma_ray.models.fingerprint import model_fingerprint
from gemma_ray.recipe import Recipe
from raycluster.placement import map_tasks
from workloads import prepare
from workloads.command import main
from workloads.endpoint import BASE, TUNED, Target, check_url, endpoint, served_models
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
    with `samples` nothing is sampled, only graded. Raises InputError for options that exclude each other, DataError for a folder without
    problems and ToolError without Icarus Verilog, before anything is served.
    """
    _check_options(samples, url, model)
    out, stage = _place(recipe, of)
    dataset = problems_folder(recipe, progress)
    load_problems(dataset)
    if recipe.cluster.address is None and simulator_version() is None:  # another cluster's hosts have programs of their own
        raise ToolError(f"grading needs iverilog and vvp, which are not on PATH: {INSTALL}")
    weights = None if url or samples else _weights(recipe, progress, of)
    _note_replaced(out, dataset, progress)

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
        once(recipe, stage, _made_from(recipe, weights, dataset), out, work, progress, lambda: whole_evaluation(out))
    return read_summary(out)


def _note_replaced(out: Path, dataset: Path, progress: Progress) -> None:
    """A run holds one evaluation of each model: say so before that of another dataset goes."""
    try:
        before = read_summary(out)["dataset"]
    except InputError:
        return
    if Path(before) != dataset:
        progress.note(f"   replaces the evaluation on {before} in {out}")


def _check_options(samples: Path | None, url: str | None, model: str | None) -> None:
    if url is not None and samples is not None:
        raise InputError("--samples is graded as it is: leave --url out")
    check_url(url, model)


def pending(recipe: Recipe, progress: Progress, of: str) -> bool:
    """Whether RUN still lacks this evaluation of these very weights."""
    out, stage = _place(recipe, of)
    made_from = _made_from(recipe, _weights(recipe, progress, of), problems_folder(recipe, progress))
    return not is_done(recipe, stage, made_from, out, lambda: whole_evaluation(out))


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
    files = [(path.name, path.stat().st_size) for path in sorted(find_problem_folder(dataset).glob("*"))]
    return [weights, recipe.eval.model_dump(mode="json"), fingerprint(files)]


def text(summary: dict[str, Any]) -> str:
    """A summary for people, one line a figure."""
    lines = [
        f"{summary['dataset']}: {summary['problems']} problems × {summary['samples_per_problem']} samples",
        f"{summary['simulator']}, sandbox: {summary['sandbox']}",
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

"""The evaluation stage: sample, grade, count.

    endpoint ─ sampling ─► samples.jsonl ─ grading ─► results.jsonl ─ statistics ─► summary.json
    samples file ─────────────┘

What counts. pass@k is over all problems that have samples, as in VerilogEval's own analysis. That includes problems that no program can
pass under this simulator (Prob099's bench does not compile, three references run into their bench's TIMEOUT): leaving them out would make
the number incomparable. They are listed under `set_aside` with the reason, found by grading each problem's own reference first. Problems
without any sample in a handed-in file are not counted, as upstream does not, and are listed under `problems_without_samples`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from gemma_ray.artifacts import read_json, write_json, write_text
from gemma_ray.errors import InputError, StageError, ToolError
from gemma_ray.evaluation.benchmarks import Problem, load_problems
from gemma_ray.evaluation.config import EvalConfig
from gemma_ray.evaluation.grading import Grade, GradeTask, grade, reference_task, simulator_version
from gemma_ray.evaluation.samples import Sample, dump, put_aside, read_samples
from gemma_ray.evaluation.sampling import Progress, draw_samples
from gemma_ray.evaluation.sandbox import Limits
from gemma_ray.evaluation.statistics import Estimate, estimate
from gemma_ray.icarus import INSTALL

GradeMap = Callable[[Callable[[GradeTask], Grade], Sequence[GradeTask]], Iterable[Grade]]
"""Runs a function over items, anywhere, and yields the results in any order; function and items can be pickled."""

KS = (1, 5)


@dataclass(frozen=True)
class EvalSummary:
    """What `summary.json` holds. Estimates are None when a problem has fewer than k samples."""

    dataset: str
    model: str | None
    problems: int
    samples: int
    samples_per_problem: int
    pass_at: dict[int, Estimate | None]
    verdicts: dict[str, int]
    letters: dict[str, int]
    harness_errors: int
    harness_error: str | None
    simulator: str
    sandbox: str
    rules: str
    set_aside: list[dict[str, str]]
    problems_without_samples: list[str]
    refused: int
    config: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """`pass@1` and `pass@5` in the place of `pass_at`."""
        document = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        pass_at: dict[int, Estimate | None] = document.pop("pass_at")
        return {**{f"pass@{k}": e.to_json() if e else None for k, e in pass_at.items()}, **document}


_SUMMARY = TypeAdapter(EvalSummary)


def evaluate(
    config: EvalConfig,
    dataset: Path,
    out: Path,
    *,
    url: str | None = None,
    model: str | None = None,
    samples: Path | None = None,
    made_from: Any = None,
    grade_map: GradeMap | None = None,
    progress: Progress | None = None,
) -> EvalSummary:
    """Evaluate an endpoint's model, or a samples file, on a folder of problems; `out` gets samples.jsonl, results.jsonl, summary.json.

    url        an OpenAI-compatible endpoint; its `model`, or its only one when None. Not used with `samples`.
    samples    a file of samples to grade instead.
    made_from  anything that changes when the model behind the name does: samples of another are not gone on with.
    grade_map  how to run the grading elsewhere, for example as Ray tasks; by default threads here, `config.graders` at once.
    progress   called with (done, total, what).

    The caller looks at `harness_errors`: when it is not 0, some samples count as failures that were not the model's.
    Raises DataError for the dataset or the samples file, ToolError without Icarus Verilog, and what `draw_samples` raises.
    """
    problems = load_problems(dataset, None)
    chosen = problems[: config.limit]
    if grade_map is None and simulator_version() is None:
        raise ToolError(f"grading needs iverilog and vvp, which are not on PATH: {INSTALL}")
    if samples is not None:
        given = read_samples(samples, {p.task_id for p in problems})
        drawn = _keep_copy(_only(given, chosen), samples, out / "samples.jsonl")
    elif url is not None:
        drawn, model = draw_samples(chosen, config, out / "samples.jsonl", url=url, model=model, made_from=made_from, progress=progress)
    else:
        raise InputError("nothing to evaluate: give an endpoint's URL or a samples file")
    sampled = {s.task_id for s in drawn}
    grades, references = _grade_all(
        [p for p in chosen if p.task_id in sampled], drawn, config, grade_map or _threads(config.graders), progress
    )
    write_text(out / "results.jsonl", "".join(json.dumps(g.to_json(), ensure_ascii=False) + "\n" for g in grades))
    summary = _summarise(config, dataset, model, chosen, drawn, grades, references)
    write_json(out / "summary.json", summary.to_json())
    return summary


def read_summary(folder: Path) -> dict[str, Any]:
    """The `summary.json` that `evaluate` left in `folder`. Raises InputError when it is missing or damaged."""
    path = folder / "summary.json"
    try:
        document = read_json(path)
        _SUMMARY.validate_python({**document, "pass_at": {k: document[f"pass@{k}"] for k in KS}})
    except (OSError, ValueError, RecursionError, LookupError, TypeError) as e:
        raise InputError(f"{path} is missing or damaged; remove it and run the evaluation again") from e
    return document


def whole_evaluation(folder: Path) -> bool:
    """Whether a finished evaluation is in `folder`: all was graded, and summary, results and samples agree on their number."""
    try:
        summary = read_summary(folder)
        counts = {_lines_of_json(folder / name) for name in ("results.jsonl", "samples.jsonl")}
    except (InputError, OSError, ValueError, RecursionError):
        return False
    return counts == {summary["samples"]} and not summary["harness_errors"]


def _lines_of_json(path: Path) -> int:
    return sum(isinstance(json.loads(line), dict) for line in path.read_bytes().splitlines())


def _only(given: list[Sample], problems: Sequence[Problem]) -> list[Sample]:
    """The samples of the first `eval.limit` problems."""
    wanted = {p.task_id for p in problems}
    kept = [s for s in given if s.task_id in wanted]
    if not kept:
        raise InputError(f"eval.limit = {len(problems)}: none of the samples is of the first {len(problems)} problems")
    return kept


def _keep_copy(drawn: list[Sample], source: Path, target: Path) -> list[Sample]:
    """Leave the graded samples in `target`; a file of sampled ones there is renamed, unless it is the source."""
    if target.exists() and target.samefile(source):
        return drawn
    if target.exists() and target.with_suffix(".meta.json").exists():
        put_aside(target)
    write_text(target, dump(drawn))
    return drawn


def _grade_all(
    problems: Sequence[Problem], samples: Sequence[Sample], config: EvalConfig, grade_map: GradeMap, progress: Progress | None
) -> tuple[list[Grade], list[Grade]]:
    """Grades in the samples' order, and those of the problems' own references. Samples of a problem with the same code are graded once."""
    limits = Limits(cpu_s=config.timeout_s, memory_bytes=int(config.memory_gib * (1 << 30)))
    by_id = {p.task_id: p for p in problems}
    references = _mapped(grade_map, [reference_task(p, limits, config.rules) for p in problems], "references graded", progress)
    expected = {task_id: g.samples_taken for (task_id, _), g in references.items()}
    same: dict[tuple[str, str | None], list[Sample]] = defaultdict(list)
    for sample in samples:
        same[sample.task_id, sample.code].append(sample)
    tasks = [
        GradeTask(by_id[task_id], group[0].sample, code, expected[task_id], limits, config.rules) for (task_id, code), group in same.items()
    ]
    graded = _mapped(grade_map, tasks, "programs graded", progress)
    grades = {}
    for (task_id, _), group in same.items():
        first = graded[task_id, group[0].sample]
        for sample in group:
            refused = {"detail": f"the endpoint refused the request: {sample.error}"} if sample.error else {}
            grades[task_id, sample.sample] = dataclasses.replace(first, sample=sample.sample, **refused)
    return [grades[s.task_id, s.sample] for s in samples], list(references.values())


def _mapped(grade_map: GradeMap, tasks: Sequence[GradeTask], what: str, progress: Progress | None) -> dict[tuple[str, int], Grade]:
    grades: dict[tuple[str, int], Grade] = {}
    if progress:
        progress(0, len(tasks), what)
    for result in grade_map(grade, tasks):
        grades[result.task_id, result.sample] = result
        if progress:
            progress(len(grades), len(tasks), what)
    if len(grades) != len(tasks):
        raise StageError(f"grading returned {len(grades)} of {len(tasks)} results")
    return grades


def _threads(graders: int) -> GradeMap:
    """Grade here: each thread waits for processes of its own."""

    def run(function: Callable[[GradeTask], Grade], items: Sequence[GradeTask]) -> Iterator[Grade]:
        with ThreadPoolExecutor(graders or os.cpu_count() or 1) as pool:
            yield from pool.map(function, items)

    return run


def _summarise(
    config: EvalConfig,
    dataset: Path,
    model: str | None,
    chosen: Sequence[Problem],
    samples: Sequence[Sample],
    grades: Sequence[Grade],
    references: Sequence[Grade],
) -> EvalSummary:
    passed: dict[str, list[bool]] = defaultdict(list)
    for g in grades:
        passed[g.task_id].append(g.verdict == "pass")
    counts = [(len(row), sum(row)) for row in passed.values()]
    ran = [g for g in [*grades, *references] if g.simulator]
    errors = [g for g in [*grades, *references] if g.verdict == "harness_error"]
    return EvalSummary(
        dataset=str(dataset),
        model=model,
        problems=len(counts),
        samples=len(grades),
        samples_per_problem=min(n for n, _ in counts),
        pass_at={k: estimate(counts, k) for k in KS},
        verdicts=dict(Counter(g.verdict for g in grades).most_common()),
        letters=dict(Counter(g.letter for g in grades if g.letter).most_common()),
        harness_errors=len(errors),
        harness_error=errors[0].detail if errors else None,
        simulator=", ".join(sorted({g.simulator for g in ran})) or "none",
        sandbox=", ".join(sorted({g.sandbox for g in ran})) or "none",
        rules=config.rules,
        set_aside=[
            {"task_id": g.task_id, "reason": f"its own reference gets {g.verdict} ({g.letter or '-'}): {g.detail}"}
            for g in sorted(references, key=lambda g: g.task_id)
            if g.verdict != "pass"
        ],
        problems_without_samples=[p.task_id for p in chosen if p.task_id not in passed],
        refused=sum(s.error is not None for s in samples),
        config=config.model_dump(mode="json"),
    )

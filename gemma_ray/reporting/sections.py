"""The sections that show results: training, data, quality, verification, latency."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gemma_ray.reporting.blocks import Bar, Bars, Block, Details, Note, Row, Section, Table, missing, run_columns, side_by_side
from gemma_ray.reporting.plots import PlotGroup, latency_plots, pass_plots, training_plots
from gemma_ray.reporting.sources import Evaluation, Run
from gemma_ray.reporting.summary import comparable
from gemma_ray.reporting.units import count, duration, interval, milliseconds, percent, small
from gemma_ray.reporting.views import BenchCell, Latency, Step


def training_section(runs: Sequence[Run]) -> Section:
    """Loss, learning rate and throughput over steps."""
    if not any(run.metrics for run in runs):
        return Section("training", "Training", [missing("Training")])
    rows = [
        ("steps", lambda s: count(s[-1].step)),
        ("loss, first step", lambda s: f"{s[0].loss:.4f}"),
        ("loss, last step", lambda s: f"{s[-1].loss:.4f}"),
        ("lowest loss of a step", lambda s: f"{min(x.loss for x in s):.4f}"),
        ("largest gradient norm", lambda s: small(max((x.grad_norm for x in s if x.grad_norm is not None), default=None))),
        ("median tokens/s, padding left out", lambda s: small(_median([x.tokens_per_s for x in s]))),
        ("median step", lambda s: duration(_median([x.step_s for x in s]))),
        ("loss tokens, all steps", lambda s: count(_sum_loss_tokens(s))),
    ]
    table = side_by_side(runs, lambda run: run.metrics or None, rows)
    return Section("training", "Training", [training_plots(runs), replace(table, facts=len(runs) == 1)])


def _median(values: Sequence[float | None]) -> float | None:
    import statistics

    found = [v for v in values if v is not None]
    return statistics.median(found) if found else None


def _sum_loss_tokens(steps: Sequence[Step]) -> int | None:
    found = [s.loss_tokens for s in steps if s.loss_tokens is not None]
    return sum(found) if found else None


def data_section(runs: Sequence[Run]) -> Section:
    """Rows in and out, and what the tokens are spent on."""
    if not any(run.manifest for run in runs):
        return Section("data", "Data", [missing("Data")], narrow=True)
    reasons = sorted({reason for run in runs if run.manifest for reason in run.manifest.rows_dropped})
    rows: list[tuple[str, Any]] = [
        ("rows read", lambda m: count(m.rows_read)),
        ("rows kept", lambda m: count(m.rows_kept)),
        *((f"dropped: {reason.replace('_', ' ')}", lambda m, reason=reason: count(m.rows_dropped.get(reason, 0))) for reason in reasons),
        ("tokens", lambda m: count(m.tokens)),
        ("tokens that bear loss", lambda m: count(m.loss_tokens)),
        ("their share", lambda m: percent(m.loss_tokens / m.tokens if m.tokens else None)),
        ("padding, share of all positions", lambda m: percent(m.padding_fraction)),
        ("shards", lambda m: count(len(m.shards))),
    ]
    return Section("data", "Data", [side_by_side(runs, lambda run: run.manifest, rows)], narrow=len(runs) < 3)


def quality_section(runs: Sequence[Run]) -> Section:
    """pass@k before and after, and where the samples failed."""
    title = "Quality: pass@k before and after"
    evaluations = [(run, when, e) for run in runs for when, e in (("before", run.before), ("after", run.after)) if e]
    if not evaluations:
        return Section("quality", title, [missing("Evaluation")])
    blocks: list[Block] = [*_beside(runs, pass_plots(runs), _pass_table(runs)), *_paired_notes(runs)]
    blocks += [
        Note(f"{_label(runs, run)}before and after were not measured alike (problems, samples, dataset or rules differ).", "warn")
        for run in runs
        if run.before and run.after and not comparable(run)
    ]
    names = sorted({name for _, _, e in evaluations for name in e.summary.verdicts}, key=lambda n: (n != "pass", n))
    if names:
        bars = [Bar(f"{_label(runs, run)}{when}", [(n, e.summary.verdicts.get(n, 0)) for n in names]) for run, when, e in evaluations]
        columns = ["verdict", *(f"{_label(runs, run)}{when}" for run, when, _ in evaluations)]
        rows = [[n, *(count(e.summary.verdicts.get(n, 0)) for _, _, e in evaluations)] for n in names]
        blocks += _beside(runs, Bars(names, bars, "Samples by verdict"), Table(columns, rows))
    blocks += [Details(f"{_label(runs, run)}problem by problem", block=table) for run in runs if (table := _problem_table(run))]
    return Section("quality", title, blocks)


def _beside(runs: Sequence[Run], left: PlotGroup | Bars, right: Table) -> list[Block]:
    """A picture and its table in a row; several runs need the width for themselves."""
    return [Row([left, right])] if len(runs) == 1 else [left, right]


def _label(runs: Sequence[Run], run: Run) -> str:
    return f"{run.letter}: " if len(runs) > 1 else ""


def _pass_table(runs: Sequence[Run]) -> Table:
    ks = sorted({k for run in runs for e in (run.before, run.after) if e for k in e.summary.pass_at})
    columns, body = ["", *(f"{_label(runs, run)}{when}" for run in runs for when in ("before", "after"))], []
    evaluations = [e for run in runs for e in (run.before, run.after)]

    def row(label: str, value) -> None:
        body.append([label, *("not run" if e is None else value(e.summary) for e in evaluations)])

    for k in ks:
        row(f"pass@{k}", lambda s, k=k: percent(s.pass_at[k].value) if k in s.pass_at else "–")
        row("95 % interval", lambda s, k=k: (interval(s.pass_at[k].ci95) or "–") if k in s.pass_at else "–")
    row("problems × samples", lambda s: f"{count(s.problems)} × {s.samples_per_problem}")
    row("dataset", lambda s: _end_of_path(s.dataset) if s.dataset else "–")
    row("model", lambda s: s.model or "–")
    row("simulator", lambda s: _words(s.simulator))
    row("set aside", lambda s: _words(s.set_aside) if s.set_aside else "none")
    return Table(columns, body)


def _end_of_path(path: str) -> str:
    """The last two parts of a path, which tell one folder of problems from another; the recipe below has it whole."""
    parts = path.rstrip("/").split("/")
    return path if len(parts) <= 2 else f"…/{'/'.join(parts[-2:])}"


def _words(value: Any) -> str:
    """A JSON value in a line of text."""
    if value is None:
        return "–"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_words(v)}" for key, v in value.items())
    if isinstance(value, list):
        return "; ".join(map(_words, value)) or "none"
    return str(value)


def _solved(evaluation: Evaluation) -> dict[str, tuple[int, int]]:
    """(samples that pass, samples) by problem."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for sample in evaluation.samples:
        counts[sample.task_id][0] += sample.verdict == "pass"
        counts[sample.task_id][1] += 1
    return {task: (passed, n) for task, (passed, n) in sorted(counts.items())}


def _paired_notes(runs: Sequence[Run]) -> list[Note]:
    notes = []
    for run in runs:
        if not (run.before and run.after and run.before.samples and run.after.samples):
            continue
        before, after = _solved(run.before), _solved(run.after)
        shared = before.keys() & after.keys()
        gained = sum(after[t][0] > 0 and before[t][0] == 0 for t in shared)
        lost = sum(before[t][0] > 0 and after[t][0] == 0 for t in shared)
        ever = [sum(found[t][0] > 0 for t in shared) for found in (before, after)]
        text = f"Of {count(len(shared))} problems, {ever[0]} had a passing sample before and {ever[1]} after: {gained} gained, {lost} lost."
        notes.append(Note(_label(runs, run) + text))
    return notes


def _problem_table(run: Run) -> Table | None:
    before = _solved(run.before) if run.before else {}
    after = _solved(run.after) if run.after else {}
    if not before and not after:
        return None

    def cell(found: dict[str, tuple[int, int]], task: str) -> str:
        return f"{found[task][0]} of {found[task][1]}" if task in found else "–"

    rows = [[task, cell(before, task), cell(after, task)] for task in sorted(before.keys() | after.keys())]
    return Table(["problem", "passing samples before", "after"], rows)


def verification_section(runs: Sequence[Run]) -> Section:
    """The exported model against the trained one."""
    if not any(run.verification for run in runs):
        return Section("verification", "Verification", [missing("Verification")], narrow=True)
    rows = [
        ("result", lambda v: {True: "passed", False: "FAILED", None: "–"}[v.passed]),
        ("largest absolute logit difference", lambda v: f"{v.max_abs_logit_diff:.2e}"),
        ("tolerance", lambda v: "–" if v.tolerance is None else f"{v.tolerance:.0e}"),
        ("largest logit", lambda v: small(v.logit_scale)),
        ("positions compared", lambda v: count(v.positions)),
        ("prompts with equal greedy tokens, Tunix", lambda v: _of(v.tunix_greedy_equal, v.prompts)),
        ("prompts with equal greedy tokens, vLLM", lambda v: _of(v.vllm_greedy_equal, v.prompts)),
        ("tensors changed by training", lambda v: count(v.tensors_changed)),
        ("tensors equal to the base", lambda v: count(v.tensors_equal_to_base)),
        ("tensors that are not finite", lambda v: count(sum(not t.finite for t in v.tensors)) if v.tensors else "–"),
    ]
    return Section("verification", "Verification", [side_by_side(runs, lambda run: run.verification, rows)], narrow=len(runs) < 3)


def _of(part: int | None, whole: int | None) -> str:
    return "–" if part is None else f"{part} of {count(whole)}"


def latency_section(runs: Sequence[Run]) -> Section:
    """TTFT, TPOT and throughput over the request rate."""
    benched = [run for run in runs if run.bench]
    if not benched:
        return Section("latency", "Latency and throughput", [missing("Benchmark")])
    heads = ["prompt tokens", "requests/s", "completed", "failed", "output tokens/s"]
    heads += [f"{metric} {p}" for metric in ("TTFT", "TPOT") for p in ("p50", "p90", "p99")] + ["E2E p50"]
    blocks: list[Block] = [latency_plots(runs)]
    for run in benched:
        cells = run.bench or []
        name = run_columns(runs)[run.index] if len(runs) > 1 else ""
        caption = f"{name + ', ' if name else ''}times in ms" + ("; * too few samples for the percentile" if any(map(_thin, cells)) else "")
        blocks.append(Table(heads, [_cell_row(cell) for cell in cells], caption))
    blocks.append(
        Note(
            "Open loop: requests arrive at the rate asked, however slow the server is. TTFT: sent to first token. "
            "TPOT: (E2E − TTFT) / (output tokens − 1). Definitions of vllm bench serve."
        )
    )
    return Section("latency", "Latency and throughput", blocks)


def _thin(cell: BenchCell) -> bool:
    return bool(cell.ttft_ms.too_few or cell.tpot_ms.too_few or cell.e2e_ms.too_few)


def _cell_row(cell: BenchCell) -> list[str]:
    def value(latency: Latency, p: str) -> str:
        mark = "*" if p in latency.too_few and getattr(latency, p) is not None else ""
        return milliseconds(getattr(latency, p)) + mark

    tails = [value(metric, p) for metric in (cell.ttft_ms, cell.tpot_ms) for p in ("p50", "p90", "p99")]
    rates = [count(cell.context), cell.rate, f"{count(cell.completed)}/{count(cell.requests)}", count(cell.failed)]
    return [*rates, f"{cell.output_tokens_per_s:,.1f}", *tails, value(cell.e2e_ms, "p50")]

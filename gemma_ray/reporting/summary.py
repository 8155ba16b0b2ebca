"""The top of the page: one sentence a run, and its key figures."""

from __future__ import annotations

from dataclasses import dataclass

from gemma_ray.reporting.blocks import NOT_RUN
from gemma_ray.reporting.sources import Run
from gemma_ray.reporting.units import NBSP, count, interval, milliseconds, percent
from gemma_ray.reporting.views import BenchCell, PassAtK


@dataclass(frozen=True)
class Figure:
    """A key figure: what it is, its value, and what the value hangs on. `tone` is "plain", "good", "bad" or "missing"."""

    label: str
    value: str
    detail: str = ""
    tone: str = "plain"


@dataclass(frozen=True)
class RunSummary:
    """A run's headline: one sentence and its key figures."""

    run: Run
    sentence: str
    figures: list[Figure]


def summarize_run(run: Run) -> RunSummary:
    """The sentence holds only clauses whose artifacts are there."""
    clauses = [clause for clause in (_quality(run), _training(run), _verification(run), _serving(run)) if clause]
    text = "; ".join(clauses) or "no result yet"
    return RunSummary(
        run, text[0].upper() + text[1:] + ".", [_pass_figure(run), _loss_figure(run), _logit_figure(run), _throughput_figure(run)]
    )


def best_cell(run: Run) -> BenchCell | None:
    """The cell with the most output tokens a second."""
    return max((c for c in run.bench or () if c.completed), key=lambda c: c.output_tokens_per_s, default=None)


def comparable(run: Run) -> bool:
    """Whether before and after were measured on the same problems, as often, by the same rules."""
    if run.before is None or run.after is None:
        return False
    a, b = run.before.summary, run.after.summary
    return (a.problems, a.samples_per_problem, a.dataset, a.rules) == (b.problems, b.samples_per_problem, b.dataset, b.rules)


def movement(before: PassAtK, after: PassAtK) -> str:
    """What the intervals allow to say: "raised" or "lowered" only where they do not overlap."""
    if before.ci95 and after.ci95:
        if after.ci95[0] > before.ci95[1]:
            return "raised"
        if after.ci95[1] < before.ci95[0]:
            return "lowered"
    return "moved"


def _pass_at_1(run: Run) -> tuple[PassAtK | None, PassAtK | None]:
    before = run.before.summary.pass_at.get(1) if run.before else None
    after = run.after.summary.pass_at.get(1) if run.after else None
    return before, after


def _quality(run: Run) -> str:
    before, after = _pass_at_1(run)
    if after is None or run.after is None:
        return ""
    summary = run.after.summary
    on = f"{count(summary.problems)} held-out problems × {summary.samples_per_problem} samples"
    if before is None:
        return f"pass@1 is {percent(after.value)} on {on}"
    if not comparable(run):
        return f"pass@1 is {percent(before.value)} before and {percent(after.value)} after, not measured alike"
    verb = movement(before, after)
    doubt = " (the 95 % intervals overlap)" if verb == "moved" and before.ci95 and after.ci95 else ""
    return f"fine-tuning {verb} pass@1 from {percent(before.value)} to {percent(after.value)} on {on}{doubt}"


def _training(run: Run) -> str:
    if not run.metrics or len(run.metrics) < 2:
        return ""
    first, last = run.metrics[0], run.metrics[-1]
    return f"the loss went from {first.loss:.3f} to {last.loss:.3f} in {count(last.step)} steps"


def _verification(run: Run) -> str:
    check = run.verification
    if check is None:
        return ""
    greedy = "its greedy tokens are the same" if check.greedy_match else "its greedy tokens differ"
    return f"the exported model's logits are within {check.max_abs_logit_diff:.1e} of the trained one's and {greedy}"


def _serving(run: Run) -> str:
    best = best_cell(run)
    if best is None:
        return ""
    return f"it served {best.output_tokens_per_s:,.1f} output tokens/s at its best ({_cell(best)})"


def _cell(cell: BenchCell) -> str:
    rate = cell.rate if cell.rate == "all at once" else f"{cell.rate} requests/s"
    return f"{count(cell.context)}-token prompts, {rate}"


def _pass_figure(run: Run) -> Figure:
    before, after = _pass_at_1(run)
    if before is None and after is None:
        return Figure("Held-out pass@1", NOT_RUN, tone="missing")
    if before is None or after is None:
        only, when = (after, "after; before was not run") if after else (before, "before; after was not run")
        assert only is not None
        ci = f"95 % CI {interval(only.ci95)}, " if only.ci95 else ""
        return Figure("Held-out pass@1", percent(only.value), f"{ci}{when}")
    detail = f"95 % CI {interval(before.ci95).removesuffix(f'{NBSP}%')} → {interval(after.ci95)}" if before.ci95 and after.ci95 else ""
    tone = {"raised": "good", "lowered": "bad"}.get(movement(before, after), "plain") if comparable(run) else "plain"
    return Figure("Held-out pass@1, before → after", f"{percent(before.value)} → {percent(after.value)}", detail, tone)


def _loss_figure(run: Run) -> Figure:
    if not run.metrics:
        return Figure("Final loss", NOT_RUN, tone="missing")
    first, last = run.metrics[0], run.metrics[-1]
    return Figure("Final loss", f"{last.loss:.3f}", f"step {count(last.step)}; {first.loss:.3f} at step {count(first.step)}")


def _logit_figure(run: Run) -> Figure:
    check = run.verification
    if check is None:
        return Figure("Largest logit difference", NOT_RUN, tone="missing")
    tolerance = f"tolerance {check.tolerance:.0e}, " if check.tolerance is not None else ""
    detail = f"{tolerance}greedy tokens {'equal' if check.greedy_match else 'differ'}"
    tone = "plain" if check.passed is None else "good" if check.passed else "bad"
    return Figure("Largest logit difference", f"{check.max_abs_logit_diff:.1e}", detail, tone)


def _throughput_figure(run: Run) -> Figure:
    best = best_cell(run)
    if best is None:
        return Figure("Output tokens/s, best cell", NOT_RUN, tone="missing")
    ttft = f", median TTFT {milliseconds(best.ttft_ms.p50)} ms" if best.ttft_ms.p50 is not None else ""
    return Figure("Output tokens/s, best cell", f"{best.output_tokens_per_s:,.1f}", f"{_cell(best)}{ttft}")

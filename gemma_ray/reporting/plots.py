"""The report's plots.

No text of the user's gets into a picture: runs are letters there, and the legend is HTML.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from gemma_ray.reporting.sources import Run
from gemma_ray.reporting.svg import BASE, CSS_OF, INK, SERIES, SURFACE, Plot, plot
from gemma_ray.reporting.views import BenchCell, Latency, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES: tuple[tuple[float, tuple[float, ...]], ...] = ((0, ()), (0, (5, 2)), (0, (1.2, 1.6)), (0, (6, 2, 1.2, 2)))
MARKERS = "osD^"
PERCENTILES = ("p50", "p90", "p99")
THIRD = (3.4, 2.3)
"""Inches of a panel that shares its row with two others."""


@dataclass(frozen=True)
class LegendEntry:
    """A mark and what it stands for; `color` is CSS, `dash` an SVG dash pattern."""

    label: str
    color: str
    dash: str = ""


@dataclass(frozen=True)
class PlotGroup:
    """Pictures that share a legend and a note."""

    kind: ClassVar[str] = "plots"
    plots: list[Plot]
    legend: list[LegendEntry] = field(default_factory=list)
    note: str = ""


def training_plots(runs: Sequence[Run]) -> PlotGroup:
    """Loss, learning rate and tokens/s over steps, a line a run."""
    plots = []
    for key, title, smooth in (
        ("loss", "Loss, nats a token", True),
        ("learning_rate", "Learning rate", False),
        ("tokens_per_s", "Tokens/s, padding left out", False),
    ):
        curves = [(run, points) for run in runs if (points := _points(run.metrics or [], key))]
        if not curves:
            continue

        def draw(ax: Axes, curves=curves, smooth=smooth) -> None:
            for run, points in curves:
                _curve(ax, points, _run_color(run), _window(points) if smooth else 1)
            ax.set_xlabel("step")
            ax.margins(x=0.01)
            ax.set_ylim(bottom=None if smooth else 0)
            ax.ticklabel_format(axis="y", scilimits=(-2, 5))

        ends = [f"run {run.letter} from {points[0][1]:.4g} to {points[-1][1]:.4g}" for run, points in curves]
        plots.append(plot(title, f"{title}, over steps: {'; '.join(ends)}", draw, THIRD))
    windows = {window for run in runs if (window := _window(run.metrics or [])) > 1}
    note = "The first step of a start includes compilation."
    if windows:
        note += f" Loss: every step (thin), and the mean of the {' or '.join(map(str, sorted(windows)))} steps around it (bold)."
    return PlotGroup(plots, _run_legend(runs), note if plots else "")


def _points(steps: Sequence[Step], key: str) -> list[tuple[int, float]]:
    """What a plot can hold of a curve: a training that diverged goes beyond it."""
    return [(step.step, value) for step in steps if (value := getattr(step, key)) is not None and not abs(value) > 1e100]


def _window(steps: Sequence[object]) -> int:
    """Steps in the running mean: a twentieth of them, and odd."""
    return len(steps) // 40 * 2 + 1


def _curve(ax: Axes, points: list[tuple[int, float]], color: str, window: int) -> None:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if window > 1:
        ax.plot(xs, ys, color=color, linewidth=0.7, alpha=0.6)
        # Centred: a mean over past steps alone lags behind a falling loss.
        spans = [ys[max(0, i - window // 2) : i + window // 2 + 1] for i in range(len(ys))]
        ax.plot(xs, [sum(span) / len(span) for span in spans], color=color)
    else:
        ax.plot(xs, ys, color=color, marker="o" if len(points) == 1 else None, linewidth=1.2)


def pass_plots(runs: Sequence[Run]) -> PlotGroup:
    """pass@k before and after, a panel a k, with 95 % intervals as whiskers."""
    ks = sorted({k for run in runs for e in (run.before, run.after) if e for k in e.summary.pass_at})
    plots = []
    for k in ks:
        bars = [
            (when, run, e.summary.pass_at[k])
            for run in runs
            for when, e in (("before", run.before), ("after", run.after))
            if e and k in e.summary.pass_at
        ]

        def draw(ax: Axes, bars=bars) -> None:
            for x, (when, run, result) in enumerate(bars):
                percent = 100 * result.value
                top = percent
                ax.bar(x, percent, width=0.6, color=BASE if when == "before" else _run_color(run))
                if result.ci95:
                    low, high = (100 * v for v in result.ci95)
                    ax.vlines(x, low, high, color=INK, linewidth=1.1)
                    ax.hlines([low, high], x - 0.07, x + 0.07, color=INK, linewidth=1.1)
                    top = max(top, high)
                ax.text(x, top + 2.5, f"{percent:.1f} %", ha="center", va="bottom", fontweight="bold")
            ax.set_xticks(range(len(bars)), [when if len(runs) == 1 else f"{when}\n{run.letter}" for when, run, _ in bars])
            ax.set_xlim(-0.7, max(1.7, len(bars) - 0.3))
            ax.set_ylim(0, 114)
            ax.set_yticks(range(0, 101, 25), [f"{v} %" for v in range(0, 101, 25)])
            ax.grid(visible=False, axis="x")
            ax.tick_params(axis="x", length=0, labelcolor=INK)

        alt = "; ".join(f"run {run.letter} {when} {100 * result.value:.1f} %" for when, run, result in bars)
        plots.append(plot(f"pass@{k}", alt, draw, (max(2.7, 0.9 + 0.8 * len(bars)), 2.6)))
    legend = [LegendEntry("base model", "var(--base)"), *_run_legend(runs)] if len(runs) > 1 else []
    return PlotGroup(plots, legend, "Whiskers are 95 % confidence intervals." if plots else "")


def latency_plots(runs: Sequence[Run]) -> PlotGroup:
    """TTFT and TPOT at p50, p90 and p99, throughput and E2E over the request rate: a colour a context, a line style a run."""
    benched = [run for run in runs if run.bench and any(cell.completed for cell in run.bench)]
    if not benched:
        return PlotGroup([])
    axes = _RateAxes(benched)
    plots = [
        *axes.panels([(f"TTFT {p}, ms", _latency("ttft_ms", p)) for p in PERCENTILES]),
        *axes.panels([(f"TPOT {p}, ms", _latency("tpot_ms", p)) for p in PERCENTILES]),
        *axes.panels([("Output tokens/s", lambda cell: (cell.output_tokens_per_s, False))]),
        *axes.panels([("Completed requests/s", lambda cell: (cell.achieved_qps, False))]),
        *axes.panels([("E2E p50, ms", _latency("e2e_ms", "p50"))]),
    ]
    legend = [LegendEntry(f"{context:,} prompt tokens", CSS_OF[axes.color(context)]) for context in axes.contexts]
    if len(benched) > 1:
        legend += [LegendEntry(f"{run.letter}: {run.name}", "var(--ink)", _dash(run.index)) for run in benched]
    hollow = any(_latency(m, p)(cell)[1] for cell in axes.cells for m in ("ttft_ms", "tpot_ms") for p in PERCENTILES)
    return PlotGroup(plots, legend, "Hollow marks: too few samples for that percentile; p99 wants 100." if hollow else "")


Reading = Callable[[BenchCell], tuple[float | None, bool]]
"""A cell's value, and whether it rests on too few samples."""


def _latency(metric: str, percentile: str) -> Reading:
    def read(cell: BenchCell) -> tuple[float | None, bool]:
        latency: Latency = getattr(cell, metric)
        return getattr(latency, percentile), percentile in latency.too_few

    return read


class _RateAxes:
    """Panels over the request rate. Rates are evenly spaced, for they double from one to the next and end at infinity."""

    def __init__(self, runs: Sequence[Run]):
        self.runs = runs
        self.cells = [cell for run in runs for cell in run.bench or () if cell.completed]
        self.rates = sorted({cell.qps for cell in self.cells})
        self.contexts = sorted({cell.context for cell in self.cells})

    def panels(self, readings: Sequence[tuple[str, Reading]]) -> list[Plot]:
        """Panels that share their vertical scale; none when no cell has a value."""
        values = [value for _, read in readings for cell in self.cells if (value := read(cell)[0]) is not None]
        return [self.panel(title, read, _limits(values)) for title, read in readings] if values else []

    def panel(self, title: str, read: Reading, limits: tuple[bool, float, float]) -> Plot:
        lines = [(run, context, points) for run in self.runs for context in self.contexts if (points := self.points(run, context, read))]

        def draw(ax: Axes) -> None:
            for run, context, points in lines:
                color = self.color(context)
                style = LINES[run.index % len(LINES)]
                ax.plot([x for x, _, _ in points], [y for _, y, _ in points], color=color, linestyle=style)
                for x, y, hollow in points:
                    face = SURFACE if hollow else color
                    marker = MARKERS[run.index % len(MARKERS)]
                    ax.plot([x], [y], marker, color=color, markerfacecolor=face, markersize=4.5, markeredgewidth=1.2)
            _scale(ax, limits)
            ax.set_xticks(range(len(self.rates)), ["∞" if math.isinf(rate) else f"{rate:g}" for rate in self.rates])
            ax.set_xlim(-0.25, max(len(self.rates) - 0.75, 0.25))
            ax.set_xlabel("requests a second" + (" (∞ = all at once)" if any(map(math.isinf, self.rates)) else ""))
            ax.grid(visible=False, axis="x")

        ends = [f"run {run.letter}, {context:,} tokens, from {points[0][1]:.4g} to {points[-1][1]:.4g}" for run, context, points in lines]
        return plot(title, f"{title}, over the request rate: {'; '.join(ends)}", draw, THIRD)

    def points(self, run: Run, context: int, read: Reading) -> list[tuple[int, float, bool]]:
        """(place of the rate, value, too few samples?) of a run's cells of one context."""
        cells = [cell for cell in run.bench or () if cell.context == context and cell.completed]
        return [(self.rates.index(cell.qps), value, few) for cell in cells for value, few in [read(cell)] if value is not None]

    def color(self, context: int) -> str:
        return SERIES[self.contexts.index(context) % len(SERIES)]


def _limits(values: Sequence[float]) -> tuple[bool, float, float]:
    """(logarithmic?, bottom, top): logarithmic when the largest is more than 30 times the smallest."""
    positive = [value for value in values if value > 0]
    if positive and max(positive) > 30 * min(positive):
        return True, min(positive) / 1.5, max(positive) * 1.5
    return False, 0.0, (max(values) or 1.0) * 1.08


def _scale(ax: Axes, limits: tuple[bool, float, float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    logarithmic, bottom, top = limits
    if logarithmic:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_ylim(bottom, top)


def _run_color(run: Run) -> str:
    return SERIES[run.index % len(SERIES)]


def _run_legend(runs: Sequence[Run]) -> list[LegendEntry]:
    return [LegendEntry(f"{run.letter}: {run.name}", CSS_OF[_run_color(run)]) for run in runs] if len(runs) > 1 else []


def _dash(index: int) -> str:
    return " ".join(f"{1.6 * part:g}" for part in LINES[index % len(LINES)][1])

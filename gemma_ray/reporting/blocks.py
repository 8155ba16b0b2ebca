"""What a section of the page is made of; page.html.jinja has one macro a kind. Strings are plain text and escaped there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from gemma_ray.reporting.plots import PlotGroup
from gemma_ray.reporting.sources import Run

T = TypeVar("T")
NOT_RUN = "not run"


@dataclass(frozen=True)
class Table:
    """Rows under named columns; the first cell of a row names it. `code` columns are hashes and paths, `text` columns are left-aligned."""

    kind: ClassVar[str] = "table"
    columns: list[str]
    rows: list[list[str]]
    caption: str = ""
    text: tuple[int, ...] = ()
    code: tuple[int, ...] = ()
    facts: bool = False
    """Label and value pairs that flow in several columns."""


@dataclass(frozen=True)
class Note:
    """A sentence. `tone` is "plain", "good" or "warn"."""

    kind: ClassVar[str] = "note"
    text: str
    tone: str = "plain"


@dataclass(frozen=True)
class Bar:
    """One stacked bar: its label and (name, value) parts."""

    label: str
    parts: list[tuple[str, int]]

    @property
    def total(self) -> int:
        return sum(value for _, value in self.parts)


@dataclass(frozen=True)
class Bars:
    """Stacked bars that share their part names, in the order of the legend."""

    kind: ClassVar[str] = "bars"
    names: list[str]
    bars: list[Bar]
    caption: str = ""


@dataclass(frozen=True)
class Details:
    """Something behind a click: a block, or text as it stands."""

    kind: ClassVar[str] = "details"
    summary: str
    block: Table | None = None
    text: str = ""


@dataclass(frozen=True)
class Row:
    """Blocks beside each other where there is room."""

    kind: ClassVar[str] = "row"
    blocks: list[PlotGroup | Table | Bars]


Block = PlotGroup | Table | Note | Bars | Details | Row


@dataclass(frozen=True)
class Section:
    """A part of the page with an anchor. A `narrow` one shares its row with the next where there is room."""

    anchor: str
    title: str
    blocks: list[Block] = field(default_factory=list)
    narrow: bool = False


def run_columns(runs: Sequence[Run]) -> list[str]:
    """Column heads, one a run; a lone run needs no letter."""
    return [run.name if len(runs) == 1 else f"{run.letter}: {run.name}" for run in runs]


def side_by_side(
    runs: Sequence[Run], source: Callable[[Run], T | None], rows: Sequence[tuple[str, Callable[[T], Any]]], caption: str = ""
) -> Table:
    """A column a run: `source` gives its artifact, or None for "not run"."""
    body = [[label, *(NOT_RUN if (found := source(run)) is None else str(value(found)) for run in runs)] for label, value in rows]
    return Table(["", *run_columns(runs)], body, caption)


def missing(title: str) -> Note:
    """Says that no run has this part."""
    return Note(f"{title}: {NOT_RUN}.")

"""Progress for people, on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PLAIN_INTERVAL_S = 5.0


class Progress:
    """Prints stages, notes and counters; stdout stays free for results."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}
        self._last_plain: dict[str, float] = {}

    def note(self, text: str) -> None:
        """One line."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def update(self, done: int, total: int, what: str, note: str = "") -> None:
        """Show that `done` of `total` are done; the last call of a counter has them equal."""
        if self._terminal:
            self._draw(what, done, total, note)
        elif done >= total or time.monotonic() - self._last_plain.get(what, 0.0) >= PLAIN_INTERVAL_S:
            self._last_plain[what] = time.monotonic()
            self.note(f"  {what} {done}/{total}  {note}".rstrip())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Head a stage, and say how long it took."""
        self.note(f"── {name}")
        started = time.monotonic()
        try:
            yield
        finally:
            self._stop_bar()
        self.note(f"   {name} done in {time.monotonic() - started:.0f} s")

    def _draw(self, what: str, done: int, total: int, note: str) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            columns = (
                TextColumn("   {task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._bar = RichProgress(*columns, console=Console(stderr=True), transient=False)
            self._bar.start()
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total, note=note)
        self._bar.update(self._tasks[what], completed=done, total=total, note=note)

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._tasks, self._last_plain = None, {}, {}

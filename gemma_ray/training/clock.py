"""What a step's time went into, without making the host wait for it.

host      │ input │ dispatch │ save │ input │ dispatch │ …
devices            │ step 1 ──────────────│ step 2 ───────────│
                             compute_s           step_s: from one step's end to the next one's
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class StepTime:
    """Seconds from the end of the step before, and how many of them the devices were at this step."""

    step_s: float
    compute_s: float


class StepClock:
    """Notes when each step was dispatched and when its result was there, in a thread that waits for it."""

    def __init__(self) -> None:
        self._last_end = time.perf_counter()
        self._waiting: dict[int, tuple[float, Future[float]]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="step-clock")
        self.input_s = 0.0
        """Since `taken` was called last."""

    @contextmanager
    def input(self) -> Iterator[None]:
        """Count the block as time for input."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.input_s += time.perf_counter() - started

    def taken(self) -> float:
        """`input_s`, which starts again from 0."""
        found, self.input_s = self.input_s, 0.0
        return found

    def dispatched(self, step: int, result: Any) -> None:
        """`result` is an array of the step."""
        self._waiting[step] = (time.perf_counter(), self._pool.submit(_end_of, result))

    def completed(self, step: int) -> StepTime:
        """Wait for the step, which comes after the one that was asked for last."""
        began, end = self._waiting.pop(step)
        ended, before = end.result(), self._last_end
        self._last_end = ended
        return StepTime(ended - before, ended - max(before, began))

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _end_of(result: Any) -> float:
    jax.block_until_ready(result)
    return time.perf_counter()

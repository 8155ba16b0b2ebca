"""Telling a bad batch from a good one: a loss that is not finite, or far above those before it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

import numpy as np

WINDOW = 50
LEAST = 20
"""Losses there must be before one can be called a spike."""
LAG = 2
"""Steps whose losses are not waited for: they are still under way when the next begins."""
IN_A_ROW = 5
"""Skipped steps after which skipping cannot be the answer."""


class SpikeGuard:
    """The losses of a run so far. The limit of a step depends on them alone, so a resumed run sets the same."""

    def __init__(self, factor: float | None, before: Iterable[tuple[int, float, bool]] = ()):
        """`before` are steps, losses and whether they were skipped."""
        self.factor = factor
        self.losses: dict[int, float] = {}
        self.skipped_in_a_row = 0
        for step, loss, skipped in before:
            self.add(step, loss, skipped)

    def add(self, step: int, loss: float, skipped: bool) -> None:
        """Take up a step's outcome."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if math.isfinite(loss) and not skipped:
            self.losses[step] = loss
        self.losses.pop(step - WINDOW - LAG - 1, None)

    def limit(self, step: int) -> np.float32:
        """The loss above which a step is a spike; infinite while there are too few to tell."""
        earlier = [loss for number, loss in self.losses.items() if step - WINDOW - LAG < number <= step - LAG]
        if self.factor is None or len(earlier) < LEAST:
            return np.float32(np.inf)
        return np.float32(self.factor * statistics.median(earlier))

"""The evaluation loss on held-out batches, and when to stop because of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemma_ray.models.templates import SCOPES
from gemma_ray.training.step import Batch


@dataclass(frozen=True)
class EvalLoss:
    """Means in nats over all held-out predictions: of the trained scope, and of each scope (None where it has none)."""

    loss: float
    by_scope: dict[str, float | None]


def scope_means(sums: Any, counts: Any) -> dict[str, float | None]:
    """Sums and counts [3] as means by the scope's name."""
    return {
        name: float(total) / int(count) if count else None
        for name, total, count in zip(SCOPES, np.asarray(sums), np.asarray(counts), strict=True)
    }


def evaluate(batches: Iterable[Batch], evaluate_batch: Callable[[Batch], dict[str, Any]]) -> EvalLoss:
    """The loss on `batches` together, each token counting the same; `evaluate_batch` is `Step.evaluate`."""
    found = [{key: np.asarray(value, np.float64) for key, value in evaluate_batch(batch).items()} for batch in batches]
    total = {key: sum(one[key] for one in found) for key in found[0]}
    return EvalLoss(float(total["loss"] / max(total["loss_tokens"], 1.0)), scope_means(total["by_scope"], total["scope_tokens"]))


class Patience:
    """Counts evaluations since the least loss."""

    def __init__(self, limit: int | None, before: Iterable[float] = ()):
        """`limit` evaluations without a lower loss end training; None: never. `before` are those of earlier starts."""
        self.limit, self.least, self.waited = limit, float("inf"), 0
        for loss in before:
            self.add(loss)

    def add(self, loss: float) -> None:
        """Take up an evaluation."""
        self.waited = 0 if loss < self.least else self.waited + 1
        self.least = min(self.least, loss)

    @property
    def is_over(self) -> bool:
        """Whether to stop."""
        return self.limit is not None and self.waited >= self.limit

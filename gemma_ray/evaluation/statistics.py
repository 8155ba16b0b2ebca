"""pass@k and its uncertainty.

pass@k of one problem, from n samples of which c pass, is the chance that k of them drawn without replacement hold at least one that passes:
1 - C(n-c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv 2107.03374, section 2.1). A benchmark's
pass@k is the mean over its problems.

The interval is Wilson's score interval at an effective sample size, the idea of Korn and Graubard (1998, Survey Methodology 24) for
proportions whose observations come in clusters. Problems are the clusters: resampling them (the bootstrap), or mean ± 1.96 standard errors,
gives an interval of zero width exactly where one is needed most, when every problem fails or every problem passes. With m the mean, v the
variance of the problems' values about it and P problems, the mean varies like m(1-m)/P' with

    P' = P · m(1-m) / v,        P when v is 0 at m = 0 or 1,

which is P when each problem either always passes or always fails, and more the more the problems agree. P' is held to at most P·n/k, the
number of disjoint groups of k samples that were drawn: no agreement among problems can tell more than that many independent trials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased pass@k from `c` passing of `n` samples, as a product of n-c factors' complements that neither overflows nor cancels.

    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod((n - c - i) / (n - i) for i in range(k))


@dataclass(frozen=True)
class Estimate:
    """A benchmark's pass@k with its 95 % confidence interval."""

    value: float
    ci95: tuple[float, float]

    def to_json(self) -> dict[str, object]:
        return {"value": self.value, "ci95": list(self.ci95)}


def estimate(counts: Sequence[tuple[int, int]], k: int) -> Estimate | None:
    """pass@k over problems given as (samples n, passing c); None when there is no problem, or one has fewer than k samples."""
    if not counts or min(n for n, _ in counts) < k:
        return None
    values = [pass_at_k(n, c, k) for n, c in counts]
    problems = len(values)
    mean = math.fsum(values) / problems
    variance = math.fsum((v - mean) ** 2 for v in values) / problems
    groups = max(problems, sum(n for n, _ in counts) / k)
    spread = mean * (1 - mean)
    effective = problems if spread == 0 else groups if variance == 0 else min(groups, problems * spread / variance)
    return Estimate(mean, wilson(mean, effective))


def wilson(proportion: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % score interval for a proportion seen in `n` trials; `n` need not be whole."""
    z2 = Z95 * Z95
    centre = (proportion + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(proportion * (1 - proportion) / n + z2 / (4 * n * n))
    # At 0 and 1 the bound is the value itself, up to rounding.
    low = 0.0 if proportion == 0 else max(0.0, centre - half)
    high = 1.0 if proportion == 1 else min(1.0, centre + half)
    return low, high

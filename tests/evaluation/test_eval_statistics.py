"""pass@k against counting, and intervals against numbers worked by hand."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from gemma_ray.evaluation.statistics import estimate, pass_at_k, wilson


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_k_subsets_with_a_passing_sample(n: int) -> None:
    for c in range(n + 1):
        samples = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(samples, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets), abs=1e-12)


def test_pass_at_k_stays_exact_where_binomials_overflow_a_float() -> None:
    exact = 1 - math.comb(4000 - 3, 1000) / math.comb(4000, 1000)
    assert pass_at_k(4000, 3, 1000) == pytest.approx(exact, rel=1e-12)


def test_impossible_counts_are_refused() -> None:
    for n, c, k in [(5, 6, 1), (5, -1, 1), (5, 1, 6), (5, 1, 0)]:
        with pytest.raises(ValueError, match="pass@k needs"):
            pass_at_k(n, c, k)


def test_wilsons_interval_has_the_textbook_values() -> None:
    # 8 of 10: (0.8 + z²/20 ± z sqrt(0.016 + z²/400)) / (1 + z²/10) with z = 1.959964
    assert wilson(0.8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    # 0 of 10: [0, z² / (10 + z²)]
    assert wilson(0.0, 10) == pytest.approx((0.0, 3.841459 / 13.841459), abs=1e-6)
    assert wilson(1.0, 10) == pytest.approx((10 / 13.841459, 1.0), abs=1e-6)


def test_problems_that_always_or_never_pass_give_wilsons_interval_on_problems() -> None:
    found = estimate([(5, 5)] * 8 + [(5, 0)] * 2, 1)
    assert found is not None and found.value == pytest.approx(0.8)
    assert found.ci95 == pytest.approx(wilson(0.8, 10))


def test_agreeing_problems_count_for_at_most_their_independent_groups_of_samples() -> None:
    found = estimate([(10, 4)] * 6, 1)
    assert found is not None and found.ci95 == pytest.approx(wilson(0.4, 60))
    # Half pass 2 of 4, half 3 of 4: m = 0.625, v = 0.015625, P' = 10 · 0.234375 / 0.015625 = 150, held to 40 samples.
    found = estimate([(4, 2), (4, 3)] * 5, 1)
    assert found is not None and found.ci95 == pytest.approx(wilson(0.625, 40))
    # Half pass 1 of 10, half 9 of 10: m = 0.5, v = 0.16, P' = 10 · 0.25 / 0.16 = 15.625.
    found = estimate([(10, 1), (10, 9)] * 5, 1)
    assert found is not None and found.ci95 == pytest.approx(wilson(0.5, 15.625))


def test_the_interval_has_width_at_zero_and_at_one() -> None:
    for passing in (0, 5):
        found = estimate([(5, passing)] * 20, 5)
        assert found is not None and found.value == passing / 5
        low, high = found.ci95
        assert low <= found.value <= high and 0.1 < high - low < 0.25


def test_k_above_the_smallest_sample_count_has_no_estimate() -> None:
    assert estimate([(5, 1), (4, 1)], 5) is None
    assert estimate([], 1) is None
    assert estimate([(5, 1), (4, 1)], 4) is not None


def test_the_interval_holds_the_true_rate_about_as_often_as_it_says() -> None:
    """Problems with rates from a U-shaped Beta(0.5, 0.5), as benchmarks have; the true pass@1 is 0.5."""
    draw = random.Random(7)
    held = 0
    for _ in range(400):
        counts = []
        for _ in range(40):
            rate = draw.betavariate(0.5, 0.5)
            counts.append((5, sum(draw.random() < rate for _ in range(5))))
        found = estimate(counts, 1)
        assert found is not None
        held += found.ci95[0] <= 0.5 <= found.ci95[1]
    assert 0.92 <= held / 400 <= 0.985

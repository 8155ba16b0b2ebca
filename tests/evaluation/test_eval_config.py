"""What the recipe's `eval` section refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gemma_ray.evaluation.config import EvalConfig


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e300, 0, -1])
@pytest.mark.parametrize("key", ["timeout_s", "memory_gib", "request_timeout_s"])
def test_a_quantity_is_finite_and_above_0(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        EvalConfig.model_validate({key: value})


@pytest.mark.parametrize(
    "change",
    [
        {"memory_gib": 1e-12},
        {"seed": -1},
        {"seed": 2**31},
        {"n": 10**12},
        {"max_tokens": 10**12},
        {"retries": 2000},  # the pause before the last of them was beyond what a float holds
        {"concurrency": 10**9},
        {"graders": 10**9},
        {"temperature": math.inf},
        {"dataset": "~no-such-user-here/x"},
        {"dataset": "a\ud800"},
        {"system_prompt": "a\ud800"},
    ],
)
def test_what_fails_only_later_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        EvalConfig.model_validate(change)

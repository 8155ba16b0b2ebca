"""What the report reads of each artifact: its keys and their types. Other keys pass by, so that an artifact may grow."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

Amount = Annotated[float, Field(ge=-1e15, le=1e15)]
"""A time or a rate. No larger one was measured; infinity and NaN are none."""
Count = Annotated[int, Field(ge=0, le=1 << 62)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class View(BaseModel):
    """What the report reads of an artifact; other keys pass by."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Step(View):
    """A line of metrics.jsonl."""

    step: Count
    loss: float
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens_per_s: Amount | None = None
    loss_tokens: Count | None = None
    step_s: Amount | None = None


class Manifest(View):
    """data/manifest.json."""

    rows_read: Count
    rows_kept: Count
    rows_dropped: dict[str, Count] = {}
    tokens: Count
    loss_tokens: Count
    padding_fraction: Fraction | None = None
    shards: list[Any] = []


class TensorCheck(View):
    """One tensor's line of verify.json."""

    name: str
    max_abs_change: float
    finite: bool


class Verification(View):
    """verify.json."""

    max_abs_logit_diff: float
    greedy_match: bool
    passed: bool | None = None
    tolerance: float | None = None
    logit_scale: float | None = None
    positions: Count | None = None
    prompts: Count | None = None
    tunix_greedy_equal: Count | None = None
    vllm_greedy_equal: Count | None = None
    tensors_changed: Count | None = None
    tensors_equal_to_base: Count | None = None
    tensors: list[TensorCheck] = []


class PassAtK(View):
    """pass@k and its 95 % interval, as summary.json has them, fractions."""

    value: Fraction
    ci95: tuple[Fraction, Fraction] | None = None


class EvalSummary(View):
    """eval/summary.json; `pass_at` holds every `pass@k` that is not null."""

    problems: Count
    samples_per_problem: Count
    verdicts: dict[str, Count] = {}
    simulator: Any = None
    set_aside: Any = None
    dataset: str | None = None
    model: str | None = None
    rules: str | None = None
    pass_at: dict[int, PassAtK] = {}

    @model_validator(mode="before")
    @classmethod
    def _collect(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        found = {int(key[5:]): value for key, value in raw.items() if key.startswith("pass@") and key[5:].isdigit() and value is not None}
        return {**raw, "pass_at": found}


class Sample(View):
    """A line of eval/results.jsonl."""

    task_id: str
    sample: int
    verdict: str


class Latency(View):
    """A metric of a cell, in ms."""

    mean: Amount | None = None
    p50: Amount | None = None
    p90: Amount | None = None
    p99: Amount | None = None
    samples: Count | None = None
    too_few: tuple[str, ...] = ()


class BenchCell(View):
    """bench/<context>_<qps>.json."""

    context: Count
    qps: float
    requests: Count
    completed: Count
    failed: Count
    output_tokens_per_s: Amount
    ttft_ms: Latency
    tpot_ms: Latency
    itl_ms: Latency = Latency()
    e2e_ms: Latency = Latency()
    duration_s: Amount | None = None
    achieved_qps: Amount | None = None
    max_send_lag_ms: Amount | None = None
    errors: dict[str, Count] = {}

    @property
    def rate(self) -> str:
        """The rate in words of a table cell."""
        return "all at once" if math.isinf(self.qps) else f"{self.qps:g}"


class Timings(View):
    """timings.json."""

    stages: dict[str, Amount]
    total_s: Amount | None = None

"""What the report reads of each artifact: its keys and their types. Other keys pass by, so that an artifact may grow."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class View(BaseModel):
    """What the report reads of an artifact; other keys pass by."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Step(View):
    """A line of metrics.jsonl."""

    step: int
    loss: float
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    loss_tokens: int | None = None
    step_s: float | None = None


class Manifest(View):
    """data/manifest.json."""

    rows_read: int
    rows_kept: int
    rows_dropped: dict[str, int] = {}
    tokens: int
    loss_tokens: int
    padding_fraction: float | None = None
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
    positions: int | None = None
    prompts: int | None = None
    tunix_greedy_equal: int | None = None
    vllm_greedy_equal: int | None = None
    tensors_changed: int | None = None
    tensors_equal_to_base: int | None = None
    tensors: list[TensorCheck] = []


class PassAtK(View):
    """pass@k and its 95 % interval, as summary.json has them, fractions."""

    value: float
    ci95: tuple[float, float] | None = None


class EvalSummary(View):
    """eval/summary.json; `pass_at` holds every `pass@k` that is not null."""

    problems: int
    samples_per_problem: int
    verdicts: dict[str, int] = {}
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

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    samples: int | None = None
    too_few: tuple[str, ...] = ()


class BenchCell(View):
    """bench/<context>_<qps>.json."""

    context: int
    qps: float
    requests: int
    completed: int
    failed: int
    output_tokens_per_s: float
    ttft_ms: Latency
    tpot_ms: Latency
    itl_ms: Latency = Latency()
    e2e_ms: Latency = Latency()
    duration_s: float | None = None
    achieved_qps: float | None = None
    max_send_lag_ms: float | None = None
    errors: dict[str, int] = {}

    @property
    def rate(self) -> str:
        """The rate in words of a table cell."""
        return "all at once" if math.isinf(self.qps) else f"{self.qps:g}"


class Timings(View):
    """timings.json."""

    stages: dict[str, float]
    total_s: float | None = None

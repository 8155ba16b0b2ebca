"""What a cell of the sweep measured.

Definitions are those of `vllm bench serve` (https://docs.vllm.ai/en/latest/benchmarking/cli/, code in vllm/benchmarks/serve.py), so that
numbers compare:

    TTFT   from sending a request to its first token
    E2E    from sending a request to its last token
    TPOT   (E2E - TTFT) / (output tokens - 1), one value a request that generated two tokens or more
    ITL    time between two chunks of an answer, all the gaps of all the requests in one pool
    output tokens/s   output tokens of completed requests / time from the first arrival to the last answer

Percentiles interpolate linearly between samples, as numpy.percentile does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from gemma_ray.benchmarking.load import RequestRecord

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Summary:
    """A metric over a cell, in ms; None without samples.

    `too_few` names the percentiles that have no sample beyond them to speak of: pX wants 100 / (100 - X) samples, so p99 wants 100.
    With fewer it is an interpolation towards the largest sample.
    """

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    samples: int
    too_few: tuple[str, ...]


def summarize(values_s: Iterable[float]) -> Summary:
    """Mean and percentiles, in ms, of values in seconds."""
    ms = np.fromiter(values_s, float) * 1e3
    too_few = tuple(f"p{p}" for p in PERCENTILES if len(ms) * (100 - p) < 100)
    if not len(ms):
        return Summary(None, None, None, None, 0, too_few)
    p50, p90, p99 = np.percentile(ms, PERCENTILES).tolist()
    return Summary(float(ms.mean()), p50, p90, p99, len(ms), too_few)


@dataclass(frozen=True)
class Cell:
    """One context × rate of the sweep. Token counts are of completed requests, as the server reported them."""

    context: int
    qps: float
    url: str
    model: str
    requests: int
    completed: int
    failed: int
    duration_s: float
    achieved_qps: float
    input_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Summary
    tpot_ms: Summary
    itl_ms: Summary
    e2e_ms: Summary
    short_outputs: int
    """Completed requests that stopped before the tokens asked for."""
    max_send_lag_ms: float
    """How late the client sent at worst; when it nears TTFT, the client and not the server is what was measured."""
    errors: dict[str, int]
    """Failures by message."""

    @property
    def name(self) -> str:
        """The file's stem: `<context>_<qps>`, for example 128_0.5 or 128_inf."""
        return cell_name(self.context, self.qps)

    def to_json(self) -> dict[str, Any]:
        """The content of the cell's file. JSON has no infinity: an unlimited rate is the string "inf"."""
        return {**asdict(self), "qps": "inf" if math.isinf(self.qps) else self.qps}

    @classmethod
    def from_json(cls, raw: Any) -> Cell:
        """Read back what `to_json` gave; other keys are left out. Raises ValueError for anything else."""
        return _CELL.validate_python(raw)


_CELL = TypeAdapter(Cell)


def cell_name(context: int, qps: float) -> str:
    """`<context>_<qps>` with the rate as short as it can be written."""
    return f"{context}_{qps:g}"


def measure(context: int, qps: float, url: str, model: str, output_tokens: int, records: Sequence[RequestRecord]) -> Cell:
    """The cell of a load's records; `output_tokens` is what each request asked for."""
    done = [r for r in records if r.ok]
    last = max((r.chunk_s[-1] for r in done), default=0.0)
    duration = last - min(r.arrival_s for r in records) if done else 0.0
    generated = sum(r.output_tokens for r in done)
    read = sum(r.input_tokens for r in done)
    return Cell(
        context=context,
        qps=qps,
        url=url,
        model=model,
        requests=len(records),
        completed=len(done),
        failed=len(records) - len(done),
        duration_s=duration,
        achieved_qps=len(done) / duration if duration else 0.0,
        input_tokens=read,
        output_tokens=generated,
        output_tokens_per_s=generated / duration if duration else 0.0,
        total_tokens_per_s=(read + generated) / duration if duration else 0.0,
        ttft_ms=summarize(r.ttft_s for r in done),
        tpot_ms=summarize(r.tpot_s for r in done if r.tpot_s is not None),
        itl_ms=summarize(gap for r in done for gap in r.itl_s),
        e2e_ms=summarize(r.e2e_s for r in done),
        short_outputs=sum(r.output_tokens < output_tokens for r in done),
        max_send_lag_ms=max(r.send_lag_s for r in records) * 1e3,
        errors=dict(Counter(r.error for r in records if r.error)),
    )

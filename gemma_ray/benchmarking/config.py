"""The recipe's `bench` section."""

from __future__ import annotations

import math

from pydantic import Field, field_validator, model_validator

from gemma_ray.section import Seconds, Section, Seed

MOST_REQUESTS = 1_000_000
MOST_TOKENS = 10_000_000


class BenchConfig(Section):
    """A sweep of prompt length × request rate. A rate of `inf` sends every request at once."""

    contexts: tuple[int, ...] = Field(default=(512, 1024, 4096), description="prompt tokens, chat template included")
    qps: tuple[float, ...] = Field(default=(1.0, 4.0, float("inf")), description="requests a second, Poisson arrivals")
    requests: int = Field(default=30, ge=1, le=MOST_REQUESTS, description="requests a cell; a p99 needs 100 or more")
    duration_s: float | None = Field(
        default=None,
        gt=0,
        le=30 * 86_400,
        description="load by time: qps × duration_s requests a cell in place of `requests` (a rate of inf keeps `requests`)",
    )
    output_tokens: int = Field(default=256, ge=1, le=MOST_TOKENS, description="tokens generated a request, end-of-turn ignored")
    timeout_s: Seconds = Field(default=600.0, description="limit of one request")
    seed: Seed = 0

    @field_validator("contexts", "qps")
    @classmethod
    def _a_file_each(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        if not values or any(not v > 0 for v in values):
            raise ValueError("name at least one value, each above 0")
        if len({f"{value:g}" if isinstance(value, float) else value for value in values}) != len(values):
            raise ValueError("each value once, and rates apart in their first six digits: a cell's file is named after them")
        return values

    @field_validator("contexts")
    @classmethod
    def _possible(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if max(values) > MOST_TOKENS:
            raise ValueError(f"at most {MOST_TOKENS:,} tokens")
        return values

    @field_validator("qps")
    @classmethod
    def _rates(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        if any(not 1e-4 <= value <= 1e6 for value in values if not math.isinf(value)):
            raise ValueError("a rate is from 0.0001 to 1,000,000 requests a second, or inf")
        return values

    @model_validator(mode="after")
    def _in_memory(self) -> BenchConfig:
        if (most := max(map(self.requests_at, self.qps))) > MOST_REQUESTS:
            raise ValueError(f"bench.qps × bench.duration_s makes {most:,} requests a cell, of at most {MOST_REQUESTS:,}; lower one")
        return self

    def requests_at(self, qps: float) -> int:
        """How many requests a cell of this rate sends."""
        if self.duration_s is None or math.isinf(qps):
            return self.requests
        return max(1, round(qps * self.duration_s))

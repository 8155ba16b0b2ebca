"""The recipe's `bench` section."""

from __future__ import annotations

from pydantic import Field, field_validator

from gemma_ray.section import Section


class BenchConfig(Section):
    """A sweep of prompt length × request rate. A rate of `inf` sends every request at once."""

    contexts: tuple[int, ...] = Field((512, 1024, 4096), description="prompt tokens, chat template included")
    qps: tuple[float, ...] = Field((1.0, 4.0, float("inf")), description="requests a second, Poisson arrivals")
    requests: int = Field(30, ge=1, description="requests a cell")
    output_tokens: int = Field(256, ge=1, description="tokens generated a request, end-of-turn ignored")
    timeout_s: float = Field(600.0, gt=0, description="limit of one request")
    seed: int = 0

    @field_validator("contexts", "qps")
    @classmethod
    def _positive(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        if not values or any(not v > 0 for v in values):
            raise ValueError("name at least one value, each above 0")
        return values

"""The recipe's `cost` section."""

from __future__ import annotations

from pydantic import Field

from gemma_ray.section import Section


class CostConfig(Section):
    """What the hardware costs. With no price, the report shows times and no money."""

    usd_per_hour: float | None = Field(default=None, ge=0, description="the whole slice or node, an hour")
    source: str | None = Field(default=None, description="where the price is from, and its date")

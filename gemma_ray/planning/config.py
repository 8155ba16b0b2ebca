"""The recipe's `plan` section."""

from __future__ import annotations

from pydantic import Field

from gemma_ray.section import Section


class PlanConfig(Section):
    """What a plan assumes besides what the other sections say."""

    attention_efficiency: float = Field(
        default=0.5, gt=0, le=1, description="share of peak FLOP/s that the attention kernel reaches; XLA has no estimate for it"
    )
    hardware: dict[str, float] = Field(
        default_factory=dict, description="figures of the chip that replace the table's, by field: `{hbm_bandwidth: 2.0e12}`"
    )
    weight_bytes: float = Field(default=2.0, gt=0, description="bytes of a weight in serving: 2 = bfloat16, 1 = fp8 or int8")
    sweep_limit_s: float = Field(default=1800.0, gt=0, description="`--sweep` starts no further compilation after so many seconds")

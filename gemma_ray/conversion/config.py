"""The recipe's `convert` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gemma_ray.section import Section


class ConvertConfig(Section):
    """How the trained adapter becomes Hugging Face files."""

    format: Literal["merged"] = "merged"
    max_shard_bytes: int = Field(default=5 * 1000**3, ge=1, description="size at which a new safetensors file begins")
    logit_tolerance: float = Field(default=1e-3, gt=0, description="largest fp32 logit difference that `verify` accepts")
    verify_prompts: int = Field(default=6, ge=1, description="prompts whose greedy tokens `verify` compares")
    verify_new_tokens: int = Field(default=32, ge=1)

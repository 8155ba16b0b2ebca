"""The recipe's `model` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gemma_ray.section import Section, Seed

DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
"""Bytes of a number, by the dtype's name in config.json or in vLLM's arguments."""


class PretrainConfig(Section):
    """How the built-in tiny model's base weights are made: full-parameter training on raw Verilog text."""

    modules: int = Field(default=2000, ge=1, le=10_000_000, description="Verilog modules of raw text to train on")
    steps: int = Field(default=200, ge=1, le=2**31 - 1)
    batch_size: int = Field(default=16, ge=1, le=1_000_000, description="rows a step, over all devices")
    seq_len: int = Field(default=256, ge=16, le=10_000_000, description="tokens a row")
    learning_rate: float = Field(default=3e-3, gt=0)
    warmup_steps: int = Field(default=20, ge=0)
    seed: Seed = 0


class ModelSection(Section):
    """Where the base model comes from.

    `source` is a local folder with Hugging Face files, or `built-in:gemma4-tiny`: a small model with Gemma 4 31B's structure,
    trained on this machine on first use and cached in `run.cache_dir`. `-e2b`, `-e4b` and `-26b-a4b` behind that name give the others'.
    """

    source: str = "built-in:gemma4-tiny"
    dtype: Literal["float32", "bfloat16"] = Field(default="bfloat16", description="dtype of base weights and activations in training")
    pretrain: PretrainConfig = PretrainConfig()

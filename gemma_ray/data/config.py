"""The recipe's `data` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from gemma_ray.section import Section, Seed


class DataConfig(Section):
    """What is trained on, and how it is rendered.

    `source` is a JSONL file, a folder of them, a glob, or `built-in:verilog`: the seeded generator of NL→Verilog pairs.
    """

    source: str = "built-in:verilog"
    examples: int = Field(default=2000, ge=1, le=10_000_000, description="pairs that the built-in generator makes")
    heldout_problems: int = Field(default=48, ge=1, le=1_000_000, description="problems in the built-in held-out set")
    seed: Seed = 0
    max_seq_len: int = Field(default=3072, ge=16, le=10_000_000, description="tokens; longer rows are dropped and counted")
    system_prompt: str | None = None
    reasoning: Literal["drop", "context"] = Field(default="drop", description="leave reasoning out, or keep it as input without loss")
    rows_per_shard: int = Field(default=4096, ge=1)

    @field_validator("system_prompt")
    @classmethod
    def _text(cls, prompt: str | None) -> str | None:
        try:
            (prompt or "").encode()
        except UnicodeEncodeError as e:
            raise ValueError(f"position {e.start} holds half of a character; write both halves or none") from e
        return prompt

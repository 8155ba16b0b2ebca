"""The recipe's `data` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from gemma_ray.section import Section, Seed

Layout = Literal["packed", "buckets", "padded"]
Column = Literal["prompt", "answer", "reasoning", "system", "messages"]


class DataConfig(Section):
    """What is trained on, how it is cleaned, and how it is rendered.

    `source` is a file, a folder, a glob or a `gs://` place of JSON lines, Parquet or Arrow, or `built-in:verilog`: the seeded generator of
    NL→Verilog pairs.
    """

    source: str = "built-in:verilog"
    columns: dict[Column, str] | None = Field(
        default=None,
        description="for records of no known schema: which column holds the prompt and the answer (reasoning, system), or the messages",
    )
    examples: int = Field(default=2000, ge=1, le=10_000_000, description="pairs that the built-in generator makes")
    heldout_problems: int = Field(default=48, ge=1, le=1_000_000, description="problems in the built-in held-out set")
    seed: Seed = 0
    max_seq_len: int = Field(default=3072, ge=16, le=10_000_000, description="tokens of a row")
    too_long: Literal["drop", "truncate", "refuse"] = Field(
        default="drop",
        description="examples longer than a row; truncate cuts reasoning, then the last question, and keeps the answer whole",
    )
    layout: Layout = Field(
        default="packed",
        description="several examples a row, rows of a few lengths (a batch has one), or one example padded to max_seq_len",
    )
    system_prompt: str | None = Field(default=None, description="in place of the records' own")
    reasoning: Literal["drop", "keep"] = Field(default="drop", description="leave reasoning out of the input, or keep it")
    loss: Literal["final_answer", "assistant", "full"] = Field(
        default="final_answer", description="what bears loss: the last answer; everything that the model says, reasoning too; every token"
    )
    verilog: bool = Field(default=True, description="drop answers without a Verilog module")
    icarus: bool = Field(default=False, description="drop answers whose modules Icarus Verilog does not parse")
    near_duplicates: float | None = Field(
        default=0.9, gt=0, le=1, description="drop examples whose word runs are so alike to an earlier one's (Jaccard); null keeps them"
    )
    decontaminate: tuple[str, ...] = Field(
        default=("verilog-eval",),
        description="benchmarks to keep out: verilog-eval, or folders in its layout; eval.dataset joins them; [] for none at all",
    )
    bad_lines: int = Field(default=10, ge=0, description="records that cannot be read before all are refused")
    rows_per_shard: int = Field(default=4096, ge=1, description="examples a shard, packed among themselves")

    @field_validator("system_prompt")
    @classmethod
    def _text(cls, prompt: str | None) -> str | None:
        try:
            (prompt or "").encode()
        except UnicodeEncodeError as e:
            raise ValueError(f"position {e.start} holds half of a character; write both halves or none") from e
        return prompt

    @field_validator("columns")
    @classmethod
    def _enough(cls, columns: dict[Column, str] | None) -> dict[Column, str] | None:
        if columns is not None and "messages" not in columns and not {"prompt", "answer"} <= set(columns):
            raise ValueError("name the columns of prompt and answer, or that of messages")
        return columns

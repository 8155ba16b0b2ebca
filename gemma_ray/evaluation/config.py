"""The recipe's `eval` section."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from gemma_ray.evaluation.samples import is_text
from gemma_ray.section import Seconds, Section, Seed


class EvalConfig(Section):
    """pass@k on a folder of problems in VerilogEval's layout. `built-in:verilog-heldout` is the generator's held-out set."""

    dataset: str = "built-in:verilog-heldout"
    n: int = Field(default=5, ge=1, le=10_000, description="samples a problem")
    temperature: float = Field(default=0.8, ge=0)
    top_p: float = Field(default=0.95, gt=0, le=1)
    max_tokens: int = Field(default=2048, ge=1, le=10_000_000)
    system_prompt: str | None = None
    seed: Seed = 0
    limit: int | None = Field(default=None, ge=1, description="only the first so many problems, by name")
    rules: Literal["official", "paper"] = Field(
        default="official", description="paper = the laxer grader of arXiv 2605.25645, for comparison with its table"
    )
    concurrency: int = Field(default=32, ge=1, le=10_000, description="requests in flight")
    retries: int = Field(default=6, ge=0, le=1000, description="further tries of a request after 429, 5xx or a lost connection")
    request_timeout_s: Seconds = Field(default=7200.0, description="longest silence of the endpoint in one request, which draws n samples")
    api_key_env: str | None = Field(default=None, description="environment variable that holds the endpoint's key; null = no key")
    graders: int = Field(default=0, ge=0, le=1024, description="samples graded at once; 0 = one a processor")
    timeout_s: Seconds = Field(default=30.0, description="simulation limit of one sample, processor seconds; VerilogEval's is 30 s")
    memory_gib: float = Field(default=2.0, ge=0.01, le=1024, description="address space of the compiler and of the simulator")

    @field_validator("dataset", "system_prompt")
    @classmethod
    def _can_be_written(cls, value: str | None) -> str | None:
        if not is_text(value or ""):
            raise ValueError("holds half of a character; write both halves or none")
        return value

    @field_validator("dataset")
    @classmethod
    def _folder(cls, dataset: str) -> str:
        try:
            Path(dataset).expanduser()
        except RuntimeError as e:
            raise ValueError("no such user; name a folder") from e
        return dataset

"""The recipe's `eval` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gemma_ray.section import Section


class EvalConfig(Section):
    """pass@k on a folder of problems in VerilogEval's layout. `built-in:verilog-heldout` is the generator's held-out set."""

    dataset: str = "built-in:verilog-heldout"
    n: int = Field(default=5, ge=1, description="samples a problem")
    temperature: float = Field(default=0.8, ge=0)
    top_p: float = Field(default=0.95, gt=0, le=1)
    max_tokens: int = Field(default=2048, ge=1)
    system_prompt: str | None = None
    seed: int = 0
    limit: int | None = Field(default=None, ge=1, description="only the first so many problems, by name")
    rules: Literal["official"] = "official"
    concurrency: int = Field(default=32, ge=1, description="requests in flight")
    graders: int = Field(default=0, ge=0, description="samples graded at once; 0 = one a processor")
    timeout_s: float = Field(default=30.0, gt=0, description="simulation limit of one sample; VerilogEval's is 30 s")

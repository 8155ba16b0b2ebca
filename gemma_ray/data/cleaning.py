"""Why an example is not trained on: the rules that look at one example alone, in the order in which they are asked.

    encoding            a character that stands for one that could not be read, or a control character
    unbalanced_fences   an answer opens a code fence and does not close it, or the other way round
    no_module           an answer holds no Verilog module (`data.verilog`)
    unparseable         Icarus Verilog does not parse an answer's modules (`data.icarus`)
    contaminated        it gives an evaluation's problem away (`data.decontaminate`)

Others are found elsewhere: malformed, roles, not_text, no_prompt and no_answer by reading (`schemas`), too_long, no_loss and marker_in_text
by tokenising (`tokenizing`), duplicate and near_duplicate by comparing (`selection`).
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gemma_ray.data.config import DataConfig
from gemma_ray.data.contamination import Benchmark
from gemma_ray.data.grams import modules, token_runs, without_comments, word_runs
from gemma_ray.data.schemas import Dropped, Example
from gemma_ray.evaluation.sandbox import Limits, run_limited
from gemma_ray.icarus import COMPILE

_UNREADABLE = re.compile("[\ufffd\x00-\x08\x0b\x0e-\x1f\x7f]")
_FENCE_LINE = re.compile(r"^[ \t]*```", re.MULTILINE)
PARSE_LIMITS = Limits(cpu_s=5, memory_bytes=1 << 30, file_bytes=1 << 20, output_bytes=1 << 16)


def why_dropped(example: Example, config: DataConfig, benchmarks: Sequence[Benchmark]) -> Dropped | None:
    """The first rule that an example breaks; None when it is clean."""
    for turn in example.turns:
        for text in (turn.prompt, turn.answer, turn.reasoning or "", example.system or ""):
            if found := _UNREADABLE.search(text):
                return Dropped("encoding", f"\\u{ord(found[0]):04x} at {found.start()} of {text[:30]!a}")
        if len(_FENCE_LINE.findall(turn.answer)) % 2:
            return Dropped("unbalanced_fences")
    code = modules(example.turns[-1].answer)
    if config.verilog and not code:
        return Dropped("no_module")
    if config.icarus and code and (said := icarus_error(code)):
        return Dropped("unparseable", said)
    if not benchmarks:
        return None
    thought = [turn.reasoning or "" for turn in example.turns] if config.reasoning == "keep" else []
    said = [example.system or "", *thought, *(text for turn in example.turns for text in (turn.prompt, turn.answer))]
    asked, tokens = word_runs("\n".join(said)), token_runs("\n".join(modules(without_comments(text)) for text in said))
    leak = next((leak for benchmark in benchmarks if (leak := benchmark.leak(asked, tokens))), None)
    return Dropped("contaminated", leak) if leak else None


def icarus_error(code: str) -> str | None:
    """Why Icarus Verilog does not parse some modules; None when it does. Modules that they use and do not hold are no fault.

    Raises SandboxError when Icarus cannot be started.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "dut.sv").write_text(code, encoding="utf-8")
        outcome = run_limited([*COMPILE, "-t", "null", "dut.sv"], Path(folder), PARSE_LIMITS, kind="none")
    if outcome.exit_code == 0 or "Unknown module type" in outcome.output:
        return None
    errors = [line for line in outcome.output.splitlines() if "error" in line]
    return (errors or outcome.output.splitlines() or ["it said nothing"])[0][:200]

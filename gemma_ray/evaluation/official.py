"""VerilogEval's own reading of a simulation log, and the names that this project gives its letters.

The compile and simulation logs are one text, read line by line; the first decisive line wins, and what only counts when none is decisive is
looked at in the end (`scripts/sv-iv-analyze` of https://github.com/NVlabs/verilog-eval, v2). The consequences that surprise are upstream's
and are kept: a run whose bench prints TIMEOUT fails even with 0 mismatches (upstream issue 21), any line with the word "error" makes a
passing run a C, and a program whose own output looks like a passing result passes. The last is what `grading` adds to.
"""

from __future__ import annotations

import re
from typing import Literal

Verdict = Literal[
    "pass",
    "syntax_error",
    "compile_error",
    "unknown_module",
    "port_error",
    "timeout",
    "reset_style",
    "mismatch",
    "no_code",
    "spoofed",
    "sandbox_violation",
    "harness_error",
]

VERDICT_OF_LETTER: dict[str, Verdict] = {
    ".": "pass",
    "S": "syntax_error",
    "C": "compile_error",
    "e": "compile_error",
    "0": "compile_error",
    "n": "compile_error",
    "w": "compile_error",
    "m": "unknown_module",
    "p": "port_error",
    "c": "port_error",
    "T": "timeout",
    "r": "reset_style",
    "R": "mismatch",
}

# In upstream's order: on one line, the earlier row wins.
_DECISIVE = (
    ("syntax error", "S"),
    ("error: This assignment requires an explicit cast", "e"),
    ("error: Sized numeric constant must have a size greater than zero", "0"),
    ("warning: always_comb process has no sensitivities", "n"),
    ("found no sensitivities so it will never trigger", "n"),
    ("is declared here as wire", "w"),
    ("Unknown module type", "m"),
    ("Unable to bind wire/reg/memory `clk'", "c"),
    ("TIMEOUT", "T"),
)
RESULT_LINE = re.compile(r"Mismatches: (\d+) in (\d+) samples$")
_ASYNCHRONOUS_RESET = ("posedge reset", "negedge reset", "posedge r)")


def log_lines(log: str) -> list[str]:
    """The lines of a log as Python's text files give them: a carriage return ends one too."""
    return log.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def official_letter(log: str, code: str) -> str:
    """The letter that VerilogEval's analysis gives a sample with this log and this program."""
    matched = saw_error = saw_unbound = False
    for line in log_lines(log):
        for text, letter in _DECISIVE:
            if text in line:
                return letter
        saw_error |= "error" in line
        saw_unbound |= "Unable to bind wire/reg" in line
        result = RESULT_LINE.match(line)
        matched |= result is not None and int(result.group(1)) == 0
    if saw_unbound:
        return "p"
    if saw_error:
        return "C"
    if matched:
        return "."
    return "r" if any(text in code for text in _ASYNCHRONOUS_RESET) else "R"


_ANY_RESULT = re.compile(r"Mismatches:\s*(\d+)\s+in\s+(\d+)\s+samples")
_BAD_WORD = re.compile(r"\b(?:error|fail|mismatch)\b", re.IGNORECASE)


def paper_passes(compiled: bool, exit_code: int, stopped: bool, log: str) -> bool:
    """Whether the grader of arXiv 2605.25645 passes a sample, given the simulation's `log` without the compiler's.

    The first result line decides; without one a run that ends well and prints none of error, fail, mismatch passes. TIMEOUT is not looked
    at.
    """
    if not compiled or stopped:
        return False
    result = _ANY_RESULT.search(log)
    if result:
        return int(result.group(1)) == 0 and int(result.group(2)) > 0
    return exit_code == 0 and not _BAD_WORD.search(log)

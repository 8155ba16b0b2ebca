"""Which part of an answer is the program."""

from __future__ import annotations

import pytest

from gemma_ray.evaluation.extraction import extract_code

TOP = "module TopModule(output q);\n  assign q = 1;\nendmodule\n"
OLD = "module TopModule(output q);\n  assign q = 0;\nendmodule\n"
HELPER_BENCH = "module my_tb;\n  TopModule t(.q(q));\nendmodule\n"


@pytest.mark.parametrize(
    "completion",
    [
        TOP,
        f"```verilog\n{TOP}```",
        f"Here it is:\n\n```systemverilog\n{TOP}```\nIt drives one.",
        f"```\n{TOP}```",
        f"```sv\n{TOP}",
        f"<answer>```verilog\n{TOP}```</answer>",
        f"<answer>\n{TOP}</answer>",
        f"<think>First ```verilog\n{OLD}``` no.</think>\n<answer>```verilog\n{TOP}```</answer>",
        f"I think ```verilog\n{OLD}``` no.\n</think>\n```verilog\n{TOP}```",
        f"<|channel>thought\n```verilog\n{OLD}```\n<channel|>```verilog\n{TOP}```",
        f"```verilog\n{OLD}```\nThat is wrong. Corrected:\n```verilog\n{TOP}```",
        f"```verilog\n{TOP}```\nA bench for it:\n```verilog\n{HELPER_BENCH}```",
        f"Run it with:\n```bash\niverilog top.v\n```\n```verilog\n{TOP}```\n```text\nMismatches: 0\n```",
        f"[BEGIN]\n{TOP}[DONE]",
        f"Sure.\n[BEGIN]\n```verilog\n{TOP}```\n[DONE]",
        f"The module is this:\n\n{TOP}\nThe module drives one (always).",
        f"```verilog\n{OLD}\nThe fence above is open; again:\n```verilog\n{TOP}```",
        f"<answer>{OLD}</answer> or rather <answer>{TOP}</answer>",
    ],
)
def test_the_program_is_found_in_what_models_write_around_it(completion: str) -> None:
    assert extract_code(completion) == TOP


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "  \n",
        "I cannot do that.",
        "The module should always drive 1 (or logic high).",
        f"<think>\n```verilog\n{TOP}```",
        "```bash\nls\n```",
    ],
)
def test_an_answer_without_a_program_has_none(completion: str) -> None:
    assert extract_code(completion) is None


def test_a_program_cut_off_by_the_token_limit_stays_as_it_stands() -> None:
    assert extract_code("```verilog\nmodule TopModule(output q);\n  assign q") == "module TopModule(output q);\n  assign q\n"


def test_several_modules_in_a_fence_stay_together() -> None:
    both = "module add1(output y);\nendmodule\n\n" + TOP
    assert extract_code(f"```verilog\n{both}```") == both
    assert extract_code(f"Like this.\n{both}Done.") == both


def test_a_body_alone_is_a_program_for_the_completion_task() -> None:
    assert extract_code("  assign q = 1;\nendmodule\nThat is all.") == "  assign q = 1;\nendmodule\n"
    assert extract_code("```verilog\n  assign q = 1;\nendmodule\n```") == "  assign q = 1;\nendmodule\n"

"""What is cleaned away: rules on one example, planted leaks, and duplicates, exact and near, against datasketch and exact similarity."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_ray.data.cleaning import icarus_error, why_dropped
from gemma_ray.data.config import DataConfig
from gemma_ray.data.contamination import SHIPPED, VERILOG_EVAL, benchmark, of_problems, write_runs
from gemma_ray.data.grams import SHINGLE, modules, runs, signature, token_runs, word_runs
from gemma_ray.data.schemas import Example
from gemma_ray.data.selection import select
from gemma_ray.errors import DataError
from gemma_ray.evaluation.benchmarks import Problem, load_problems
from gemma_ray.models.templates import Turn

CONFIG = DataConfig()
CODE = "module TopModule (input a, output y);\n  assign y = ~a;\nendmodule"


def example(answer: str, prompt: str = "Invert a.") -> Example:
    return Example((Turn(prompt, answer),), None)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (f"```verilog\n{CODE}\n```", None),
        (f"Here it is:\n```\n{CODE}\n```\nDone.", None),
        (CODE, None),
        ("I cannot.", "no_module"),
        (f"```verilog\n{CODE}", "unbalanced_fences"),
        (f"```verilog\n{CODE}\n```\n```", "unbalanced_fences"),
        (f"```verilog\n{CODE}\n``` \ufffd", "encoding"),
        (f"```verilog\n{CODE}\n``` \x00", "encoding"),
    ],
)
def test_rules_on_one_example(answer: str, reason: str | None) -> None:
    found = why_dropped(example(answer), CONFIG, ())
    assert (found.reason if found else None) == reason


def test_text_that_is_no_verilog_is_kept_when_the_recipe_says_so() -> None:
    assert why_dropped(example("I cannot."), DataConfig(verilog=False), ()) is None


@pytest.mark.skipif(shutil.which("iverilog") is None, reason="Icarus Verilog is not installed")
@pytest.mark.parametrize(
    ("code", "parses"),
    [
        (CODE, True),
        (CODE.replace("assign", "asign"), False),
        (CODE.replace("~a", "~"), False),
        ("module top (input a, output y);\n  part p (.a(a), .y(y));\nendmodule", True),  # of which `part` is elsewhere
        ("module top; initial $finish; endmodule", True),
    ],
)
def test_icarus_says_what_does_not_parse(code: str, parses: bool) -> None:
    assert (icarus_error(code) is None) == parses
    found = why_dropped(example(f"```verilog\n{code}\n```"), DataConfig(icarus=True), ())
    assert (found is None) == parses
    assert found is None or (found.reason == "unparseable" and "error" in found.detail)


PROBLEM = """
I would like you to implement a module named TopModule with the following interface. All input and output ports are one bit.

 - input  clk
 - output q (4 bits)

The module should implement a counter that counts from 3 up to 11 and then starts over again, on every rising edge of the clock, but waits
for two more cycles whenever it has come to seven.
"""
REFERENCE = """
module RefModule (input clk, output reg [3:0] q);
  reg [1:0] wait_cycles;
  initial begin q = 4'd3; wait_cycles = 2'd0; end
  always @(posedge clk)
    if (q == 4'd7 && wait_cycles != 2'd2) wait_cycles <= wait_cycles + 2'd1;
    else begin wait_cycles <= 2'd0; q <= (q == 4'd11) ? 4'd3 : q + 4'd1; end
endmodule
"""
COUNTER = of_problems("mine", [Problem("Prob001_counter", PROBLEM, "", REFERENCE)])
RENAMED = re.sub(r"\bq\b", "value", REFERENCE).replace("wait_cycles", "n").replace("RefModule", "waiting_counter").replace("clk", "clock")
OTHER = "module up (input c, output reg [7:0] n);\n  always @(posedge c) n <= n + 1;\nendmodule"


@pytest.mark.parametrize(
    ("prompt", "code", "leaks"),
    [
        (PROBLEM, OTHER, "100% of the prompt of Prob001_counter (mine)"),
        (f"Please help me with this homework.{PROBLEM.upper()}Thanks, and hurry!", OTHER, "100% of the prompt"),
        ("Count.", REFERENCE, "100% of the reference module of Prob001_counter (mine)"),
        ("Count.", RENAMED, "100% of the reference module"),
        ("Count.", RENAMED.replace("\n", " // a comment\n").replace("(", " ( /* and */ "), "100% of the reference module"),
        ("Count.", RENAMED.replace(";\n", "; // before endmodule\n"), "100% of the reference module"),
        (f"Fix this:\n```verilog\n{RENAMED}\n```", OTHER, "100% of the reference module"),
        ("Count.", f"module before; wire x; endmodule\n{RENAMED}\n{OTHER}", "100% of the reference module"),
        ("Count.", REFERENCE.replace("4'd11", "4'd12"), "of the reference module"),
        ("Make a counter that counts from 0 to 255 on the rising edge of the clock.", OTHER, None),
    ],
)
def test_planted_leaks_are_found_and_others_are_not(prompt: str, code: str, leaks: str | None) -> None:
    found = why_dropped(example(f"```verilog\n{code}\n```", prompt), CONFIG, (COUNTER,))
    assert (found is None) == (leaks is None)
    if found is not None:
        assert found.reason == "contaminated"
        assert str(leaks) in found.detail


def test_a_leak_is_found_in_every_turn_that_is_trained_on() -> None:
    last = Turn("Go on.", f"```verilog\n{OTHER}\n```")
    leaking = [
        Example((Turn("Say it again.", PROBLEM), last), None),
        Example((last,), PROBLEM),
        Example((Turn("Go on.", last.answer, f"I remember:\n{RENAMED}"),), None),
    ]
    keep = DataConfig(reasoning="keep")
    assert [found.reason for one in leaking if (found := why_dropped(one, keep, (COUNTER,)))] == ["contaminated"] * 3
    assert why_dropped(leaking[2], CONFIG, (COUNTER,)) is None  # reasoning is left out


VERILOG_EVAL_FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "verilog-eval"
needs_verilog_eval = pytest.mark.skipif(not VERILOG_EVAL_FOLDER.is_dir(), reason="VerilogEval is not beside the project")


@needs_verilog_eval
def test_the_shipped_runs_are_those_of_verilogeval(tmp_path: Path) -> None:
    write_runs(of_problems(VERILOG_EVAL, load_problems(VERILOG_EVAL_FOLDER)), tmp_path / "runs.npz")
    with np.load(tmp_path / "runs.npz") as made, np.load(SHIPPED) as shipped:
        assert sorted(made.files) == sorted(shipped.files)
        assert all(np.array_equal(made[name], shipped[name]) for name in made.files)


@needs_verilog_eval
def test_every_problem_of_verilogeval_is_found_by_its_prompt_and_by_its_renamed_reference() -> None:
    known = benchmark(VERILOG_EVAL)
    nothing = np.zeros(0, np.uint64)
    for problem in load_problems(VERILOG_EVAL_FOLDER):
        assert known.leak(word_runs(f"Solve this: {problem.prompt} Be quick."), nothing), problem.task_id
        names = sorted(set(re.findall(r"\b[a-z]\w*\b", problem.reference)), key=len)
        own = [name for name in names if name in ("clk", "in", "out", "q", "a", "b", "state", "next", "x", "y", "z")]
        renamed = problem.reference
        for name in own:
            renamed = re.sub(rf"\b{name}\b", f"the_{name}", renamed)
        assert known.leak(nothing, token_runs(modules(renamed))), problem.task_id


def test_without_benchmarks_nothing_is_compared() -> None:
    assert why_dropped(example(f"```verilog\n{REFERENCE}\n```", PROBLEM), CONFIG, ()) is None


def test_a_benchmark_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.decontaminate: no folder .*data\.decontaminate=\[\] goes without"):
        benchmark(str(tmp_path / "nowhere"))


def test_modules_are_taken_from_fences_first() -> None:
    assert modules(f"In a module we write:\n```verilog\n{CODE}\n```\nand endmodule") == CODE
    assert modules("no code") == ""


def test_signatures_estimate_the_similarity_of_word_runs() -> None:
    """Against exact Jaccard similarity, and as close to it as datasketch with as many numbers."""
    from datasketch import MinHash

    rng = np.random.default_rng(0)
    vocabulary = np.arange(500)
    ours, theirs = [], []
    for changes in np.linspace(0, 60, 40).astype(int):
        first = rng.choice(vocabulary, 300).tolist()
        second = list(first)
        for i in rng.integers(0, 300, changes):
            second[i] = int(rng.choice(vocabulary))
        one, other = (np.unique(runs(np.array(text), SHINGLE)) for text in (first, second))
        exact = len(np.intersect1d(one, other)) / len(np.union1d(one, other))
        sketches = []
        for found in (one, other):
            sketch = MinHash(num_perm=64)
            sketch.update_batch([number.tobytes() for number in found])
            sketches.append(sketch)
        ours.append(float((signature(one) == signature(other)).mean()) - exact)
        theirs.append(sketches[0].jaccard(sketches[1]) - exact)
    assert np.abs(ours).max() < 0.2
    assert np.sqrt(np.mean(np.square(ours))) < 1.5 * max(np.sqrt(np.mean(np.square(theirs))), 0.04)


class FakeChunk:
    """A chunk in memory."""

    def __init__(self, texts: list[str]):
        self.texts = texts

    def numbers(self, name: str) -> Any:
        return np.array([{"length": len(t), "key": sum(t.encode()) * 1000 + len(t)}[name] for t in self.texts], np.uint64)

    def signatures(self) -> Any:
        return np.stack([signature(runs(np.frombuffer(t.encode(), np.uint8), SHINGLE)) for t in self.texts])


LONG = "Make a module that " + " ".join(f"does thing {i}" for i in range(60))


def test_the_first_of_equal_and_of_similar_examples_stays() -> None:
    alike, unlike = LONG.replace("thing 59", "thing 600"), LONG.upper()
    chunks: Any = [FakeChunk([LONG, "", unlike]), FakeChunk([LONG, alike]), FakeChunk([unlike, "short"])]
    chosen = select(chunks, 0.9)
    assert list(zip(chosen.chunk.tolist(), chosen.row.tolist(), strict=True)) == [(0, 0), (0, 2), (2, 1)]
    assert chosen.duplicates.tolist() == [[1, 0, 0], [2, 0, 1]]
    assert chosen.near.tolist() == [[1, 1, 0]]
    assert len(select(chunks, None).chunk) == 4


def test_nothing_to_choose_from() -> None:
    chosen = select([FakeChunk([""])], 0.9)  # type: ignore[list-item]
    assert len(chosen.chunk) == len(chosen.near) == 0

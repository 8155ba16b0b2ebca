"""What is read out of a program's text before it runs."""

from __future__ import annotations

import pytest

from gemma_ray.evaluation.scrutiny import has_open_comment, outside_file, outside_include, reaches_into_bench, without_comments

BENCH = 'module stimulus_gen(input clk); endmodule\nmodule tb; initial $dumpfile("wave.vcd");\n stimulus_gen #(.N(3)) stim1 (clk);\n'
BENCH += " RefModule good1 (.q(q_ref));\n TopModule top_module1 (.q(q_dut));\nendmodule\n"
REFERENCE = "module RefModule(output q); endmodule\n"


def test_comments_go_and_strings_stay() -> None:
    code = 'a /* b "c" */ d // e "\n"f // g" /* h'
    assert without_comments(code).split() == ["a", "d", '"f', "//", 'g"']


@pytest.mark.parametrize(
    ("code", "is_open"),
    [("module m; /* all", True), ("/*/ still", True), ("/* done */ m", False), ('"/*" m', False), ("// /*\nm", False), ("\\/* m", False)],
)
def test_an_open_comment_is_seen_where_it_is_one(code: str, is_open: bool) -> None:
    assert has_open_comment(code) is is_open


@pytest.mark.parametrize(
    "text",
    [
        "tb.q",
        "tb . q",
        "good1.q",
        "stim1.clk",
        "$root.tb",
        "RefModule r(q);",
        "RefModule #(.A(1)) r(q);",
        "stimulus_gen s(c);",
        "module tb;",
    ],
)
def test_the_benchs_scopes_are_out_of_reach(text: str) -> None:
    assert reaches_into_bench(text, BENCH, REFERENCE, "TopModule")


@pytest.mark.parametrize(
    "text",
    [
        "module TopModule(output q);",
        "sub u(.tb(q), .good1(q));",
        "s.tb.q",
        "my_tb.q",
        'x = "tb.good1";',
        "reg RefModule_q;",
        "top_module1.q",
    ],
)
def test_names_that_only_look_alike_are_not(text: str) -> None:
    assert reaches_into_bench(text, BENCH, REFERENCE, "TopModule") is None


@pytest.mark.parametrize(
    ("name", "outside"), [("defs.vh", False), ("sub/defs.vh", False), ("/etc/x", True), ("a/../../x", True), ("~/x", True)]
)
def test_names_of_files(name: str, outside: bool) -> None:
    assert (outside_include(f'`include "{name}"') is not None) is outside
    assert (outside_file(f'initial $readmemh("{name}", m);', BENCH) is not None) is outside


def test_the_benchs_waves_may_be_dumped_to_but_not_read() -> None:
    assert outside_file('initial $dumpfile("wave.vcd");', BENCH) is None
    assert outside_file('initial f = $fopen(".//wave.vcd", "r");', BENCH)

"""Verdicts and VerilogEval's letters for programs made by hand, and the attacks that its rules let through."""

from __future__ import annotations

import dataclasses
import os
import pickle
from pathlib import Path

import pytest

from gemma_ray.evaluation.benchmarks import Problem, load_problems
from gemma_ray.evaluation.grading import Grade, GradeTask, grade, reference_task
from gemma_ray.evaluation.official import official_letter, paper_passes
from gemma_ray.evaluation.sandbox import Limits, SandboxKind, sandbox_kind

pytestmark = pytest.mark.usefixtures("icarus")

DFF8 = "Prob034_dff8"
DFF8_PORTS = "module TopModule(input clk, input [7:0] d, output reg [7:0] q);\n"
GOOD = DFF8_PORTS + "  initial q = 0;\n  always @(posedge clk) q <= d;\nendmodule\n"


@pytest.fixture(scope="session")
def expected_samples(problems: dict[str, Problem]) -> int:
    taken = grade(reference_task(problems[DFF8], Limits())).samples_taken
    assert taken is not None
    return taken


def grade_dff8(problems: dict[str, Problem], expected: int | None, code: str | None, **kw: object) -> Grade:
    limits = Limits(cpu_s=float(str(kw.pop("cpu_s", 10))))
    return grade(GradeTask(problems[DFF8], 0, code, expected, limits, **kw))  # type: ignore[arg-type]


@pytest.mark.parametrize("task_id", ["Prob001_zero", "Prob034_dff8", "Prob054_edgedetect", "Prob109_fsm1", "Prob144_conwaylife"])
def test_references_pass_their_own_bench(problems: dict[str, Problem], task_id: str) -> None:
    found = grade(reference_task(problems[task_id], Limits()))
    assert (found.verdict, found.letter) == ("pass", "."), found
    assert found.detail.startswith("0 of ") and found.samples_taken


def test_a_bench_that_runs_into_its_own_timeout_fails_though_nothing_differs(problems: dict[str, Problem]) -> None:
    found = grade(reference_task(problems["Prob082_lfsr32"], Limits()))
    assert (found.verdict, found.letter, found.samples_taken) == ("timeout", "T", 200000)


OFFICIAL = {
    "pass": (GOOD, "pass", "."),
    "a program that prints for itself": (GOOD.replace("endmodule", '  initial $display("hello");\nendmodule'), "pass", "."),
    "syntax": (DFF8_PORTS + "  always @(posedge clk) q <= d\nendmodule\n", "syntax_error", "S"),
    "no end": (DFF8_PORTS + "  always @(posedge clk) q <= d;\n", "syntax_error", "S"),
    "other error": (GOOD.replace("input clk, ", "").replace("@(posedge clk)", "@(*)"), "compile_error", "C"),
    "the word error in the program's output": (
        GOOD.replace("endmodule", '  initial $display("no error");\nendmodule'),
        "compile_error",
        "C",
    ),
    "explicit cast": (
        DFF8_PORTS
        + "  typedef enum logic [7:0] {A = 0, B = 1} s_t;\n  s_t s;\n  always @(posedge clk) begin s = d; q <= s; end\nendmodule\n",
        "compile_error",
        "e",
    ),
    "zero-size constant": (GOOD.replace("q <= d", "q <= {d, 0'b0}"), "compile_error", "0"),
    "no sensitivities": (GOOD.replace("endmodule", "  logic x;\n  always_comb x = 1'b1;\nendmodule"), "compile_error", "n"),
    "assignment to a wire": (
        "module TopModule(input clk, input [7:0] d, output [7:0] q);\n  always @(posedge clk) q <= d;\nendmodule\n",
        "compile_error",
        "w",
    ),
    "unknown module": (DFF8_PORTS + "  dff u(clk, d, q);\nendmodule\n", "unknown_module", "m"),
    "unbound name": (GOOD.replace("q <= d", "q <= data"), "port_error", "p"),
    "unbound clock": (
        "module TopModule(input clock, input [7:0] d, output reg [7:0] q);\n  always @(posedge clk) q <= d;\nendmodule\n",
        "port_error",
        "c",
    ),
    "wrong function": (GOOD.replace("q <= d", "q <= ~d"), "mismatch", "R"),
    "asynchronous reset": (
        DFF8_PORTS + "  wire reset = 0;\n  always @(posedge clk or posedge reset) q <= reset ? 0 : ~d;\nendmodule\n",
        "reset_style",
        "r",
    ),
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_each_verdict_has_its_letter(problems: dict[str, Problem], expected_samples: int, name: str) -> None:
    code, verdict, letter = OFFICIAL[name]
    found = grade_dff8(problems, expected_samples, code)
    assert (found.verdict, found.letter) == (verdict, letter), found
    assert found.detail


def test_no_program_is_not_run(problems: dict[str, Problem]) -> None:
    for code in (None, "", "  \n"):
        found = grade_dff8(problems, None, code)
        assert (found.verdict, found.letter) == ("no_code", "")


WRONG = DFF8_PORTS + "  always @(posedge clk) q <= ~d;\n"
TIMESCALE = "`timescale 1 ps/1 ps\n"
FAKE = '$display("Mismatches: 0 in 20 samples");'
SPOOFS = {
    "prints the result and ends": WRONG + f"  initial begin {FAKE} $finish; end\nendmodule\n",
    "prints the result and goes on": WRONG + f"  initial {FAKE}\nendmodule\n",
    "prints it in pieces": WRONG + '  initial begin $write("Mism"); $write("atches: 0 in 2%0d samples\\n", 0); end\nendmodule\n',
    "prints it after a carriage return": WRONG + '  initial $write("\\015Mismatches: 0 in 20 samples\\015");\nendmodule\n',
    "prints it in a final block": WRONG + f"  final {FAKE}\nendmodule\n",
    "prints it with fdisplay to standard output": WRONG + '  initial $fdisplay(32\'h80000001, "Mismatches: 0 in 20 samples");\nendmodule\n',
    "prints it through a pasted name": "`define GLUE(a, b) a``b\n"
    + WRONG
    + '  initial `GLUE($dis, play)("Mismatches: 0 in 20 samples");\nendmodule\n',
    "is right and prints it too": GOOD.replace("endmodule", f"  initial {FAKE}\nendmodule"),
    "ends before the first sample": WRONG + "  initial $finish;\nendmodule\n",
    "ends with stop": WRONG + "  initial $stop;\nendmodule\n",
    "ends before the first difference": TIMESCALE + GOOD.replace("q <= d;", "q <= d;\n  initial #23 $finish;"),
    "ends when it would be wrong": WRONG.replace("q <= ~d;", "begin if (^d !== 1'bx && d != 0) $finish; end")
    + "  initial q = 0;\nendmodule\n",
    "uses the reference": "module TopModule(input clk, input [7:0] d, output [7:0] q);\n  RefModule r(clk, d, q);\nendmodule\n",
    "reads the reference's output": "module TopModule(input clk, input [7:0] d, output [7:0] q);\n  assign q = tb.good1.q;\nendmodule\n",
    "reads it from the scope above": "module TopModule(input clk, input [7:0] d, output [7:0] q);\n  assign q = good1.q;\nendmodule\n",
    "reads it by an escaped name": "module TopModule(input clk, input [7:0] d, output [7:0] q);\n  assign q = \\tb .good1.q;\nendmodule\n",
    "hides that behind a comment in an escaped name": "module TopModule(input clk, input [7:0] d, output [7:0] q);\n"
    + "  wire \\/* ; assign q = tb.good1.q; wire \\*/ ;\nendmodule\n",
    "forces the comparison": WRONG + "  initial force tb.tb_match = 1;\nendmodule\n",
}


@pytest.mark.parametrize("name", SPOOFS)
def test_programs_that_fool_the_official_rules_are_spoofed_and_keep_the_official_letter(
    problems: dict[str, Problem], expected_samples: int, name: str
) -> None:
    found = grade_dff8(problems, expected_samples, SPOOFS[name])
    assert (found.verdict, found.letter) == ("spoofed", "."), found
    assert found.detail


def test_a_program_that_brings_a_bench_of_its_own_does_not_pass(problems: dict[str, Problem], expected_samples: int) -> None:
    code = f"module tb;\n  initial begin {FAKE} $finish; end\nendmodule\n{GOOD}`ifdef NEVER\n"
    found = grade_dff8(problems, expected_samples, code)
    assert found.verdict != "pass", found


def test_a_comment_left_open_over_the_benchs_head_is_spoofed(problems: dict[str, Problem], expected_samples: int) -> None:
    """Icarus Verilog reads all files as one text: the comment ends at the first `*/` of the bench."""
    commented = dataclasses.replace(problems[DFF8], bench="/* The bench. */\n" + problems[DFF8].bench)
    assert grade(GradeTask(commented, 0, GOOD, expected_samples)).verdict == "pass"
    found = grade(GradeTask(commented, 0, GOOD + "/* open", expected_samples))
    assert (found.verdict, found.letter) == ("spoofed", "."), found


def test_a_failing_program_that_only_ends_early_is_spoofed_with_its_own_letter(problems: dict[str, Problem], expected_samples: int) -> None:
    found = grade_dff8(problems, expected_samples, TIMESCALE + WRONG + "  initial #33 $finish;\nendmodule\n")
    assert (found.verdict, found.letter) == ("spoofed", "R"), found


@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
@pytest.mark.parametrize(
    "opening",
    ['$fopen("{path}", "w")', '$fopen({{"{head}", "{tail}"}}, "w")', '`OPEN("{path}", "w")', '$fopenw("{path}")', '$fopen("{octal}", "w")'],
)
def test_a_file_outside_the_folder_is_not_written(
    problems: dict[str, Problem], expected_samples: int, tmp_path: Path, kind: SandboxKind, opening: str
) -> None:
    if kind == "bubblewrap" and sandbox_kind() == "none":
        pytest.skip("bubblewrap does not work on this machine")
    path = tmp_path / "written"
    octal = "".join(f"\\\\{ord(c):03o}" for c in str(path)).replace("\\\\", "\\")
    call = opening.format(path=path, head=str(path)[:5], tail=str(path)[5:], octal=octal)
    code = "`define OPEN $f``open\n" + GOOD.replace(
        "endmodule", f'  integer f;\n  initial begin f = {call}; $fdisplay(f, "x"); $fclose(f); end\nendmodule'
    )
    found = grade_dff8(problems, expected_samples, code, sandbox=kind)
    assert found.verdict == "sandbox_violation", found
    assert found.letter == ("." if kind == "bubblewrap" else "")
    assert not path.exists()


def test_the_attack_writes_when_nothing_stands_in_its_way(problems: dict[str, Problem], tmp_path: Path) -> None:
    """The control of the test above: the same program, run as VerilogEval runs it, writes the file."""
    import subprocess

    path = tmp_path / "written"
    code = GOOD.replace("endmodule", f'  integer f;\n  initial begin f = $fopen("{path}", "w"); $fclose(f); end\nendmodule')
    for name, text in (("dut.sv", code), ("test.sv", problems[DFF8].bench), ("ref.sv", problems[DFF8].reference)):
        (tmp_path / name).write_text(text)
    subprocess.run(["iverilog", "-g2012", "-s", "tb", "-o", "sim", "dut.sv", "test.sv", "ref.sv"], cwd=tmp_path, check=True)
    subprocess.run(["vvp", "-n", "sim"], cwd=tmp_path, check=True, capture_output=True)
    assert path.exists()


@pytest.mark.parametrize(
    "line",
    [
        '`include "/etc/passwd"',
        '`include "../build/ref.sv"',
        '`define HERE "/etc/passwd"\n`include `HERE',
        'reg [7:0] m[0:3]; initial $readmemh("/etc/hostname", m);',
        'reg [7:0] m[0:3]; initial $readmemh("../build/sim", m);',
        'integer f; initial f = $fopen("wave.vcd", "r");',
        'initial $system("id");',
    ],
)
def test_files_of_the_host_and_of_the_bench_are_violations(problems: dict[str, Problem], expected_samples: int, line: str) -> None:
    found = grade_dff8(problems, expected_samples, GOOD.replace("endmodule", f"{line}\nendmodule"))
    assert found.verdict == "sandbox_violation", found
    assert "root:" not in found.detail


def test_files_that_are_only_spoken_of_are_no_violation(problems: dict[str, Problem], expected_samples: int) -> None:
    talk = '  // $fopen("/etc/passwd") tb.good1 $finish\n  /* `include "/etc/passwd" */\n'
    talk += '  initial $display("$fopen(x) RefModule r(); $finish");\n'
    table = '  reg [7:0] m[0:3];\n  initial if (0) $readmemh("rom.hex", m);\n'
    found = grade_dff8(problems, expected_samples, GOOD.replace("endmodule", talk + table + "endmodule"))
    assert (found.verdict, found.letter) == ("pass", "."), found


@pytest.mark.parametrize("loop", ["initial forever q = q + 1;", "reg a = 0; initial a <= 1; always @(a) a <= ~a;", "initial while (1) ;"])
def test_a_loop_without_time_is_a_timeout_and_leaves_no_process(problems: dict[str, Problem], expected_samples: int, loop: str) -> None:
    found = grade_dff8(problems, expected_samples, GOOD.replace("endmodule", f"  {loop}\nendmodule"), cpu_s=1)
    assert (found.verdict, found.letter) == ("timeout", "T"), found
    assert "1 s" in found.detail
    mine = [p for p in Path("/proc").glob("[0-9]*/stat") if _is_child_vvp(p)]
    assert mine == []


def _is_child_vvp(stat: Path) -> bool:
    try:
        fields = stat.read_text()
    except OSError:
        return False
    name, rest = fields[fields.index("(") + 1 : fields.rindex(")")], fields[fields.rindex(")") + 2 :].split()
    return name in ("vvp", "bwrap") and int(rest[1]) == os.getpid()


def test_a_flood_of_output_is_a_timeout(problems: dict[str, Problem], expected_samples: int) -> None:
    flood = GOOD.replace("endmodule", '  initial forever $display("flood flood flood flood");\nendmodule')
    found = grade(GradeTask(problems[DFF8], 0, flood, expected_samples, Limits(cpu_s=30, output_bytes=100_000)))
    assert (found.verdict, found.letter) == ("timeout", "T"), found


def test_a_flood_cannot_push_the_benchs_line_out_after_a_false_one(problems: dict[str, Problem], expected_samples: int) -> None:
    flood = WRONG + f'  initial begin {FAKE} forever $display("flood"); end\nendmodule\n'
    found = grade(GradeTask(problems[DFF8], 0, flood, expected_samples, Limits(cpu_s=30, output_bytes=100_000)))
    assert (found.verdict, found.letter) == ("spoofed", "T"), found


def test_more_memory_than_allowed_fails_the_program_and_not_the_machine(problems: dict[str, Problem], expected_samples: int) -> None:
    big = GOOD.replace("endmodule", "  reg [1023:0] m[0:33554431];\n  initial m[0] = 1;\nendmodule")
    found = grade(GradeTask(problems[DFF8], 0, big, expected_samples, Limits(cpu_s=20, memory_bytes=512 << 20)))
    assert found.verdict not in ("pass", "harness_error"), found


def test_the_same_program_always_gets_the_same_grade(problems: dict[str, Problem], expected_samples: int) -> None:
    for code in (GOOD, SPOOFS["prints the result and ends"], OFFICIAL["wrong function"][0], OFFICIAL["syntax"][0]):
        assert len({grade_dff8(problems, expected_samples, code) for _ in range(3)}) == 1


def test_the_secret_is_in_no_grade_and_tasks_travel(problems: dict[str, Problem], expected_samples: int) -> None:
    task = GradeTask(problems[DFF8], 3, GOOD, expected_samples)
    found = pickle.loads(pickle.dumps(grade))(pickle.loads(pickle.dumps(task)))
    assert found.to_json() == {
        "task_id": DFF8,
        "sample": 3,
        "verdict": "pass",
        "letter": ".",
        "detail": f"0 of {expected_samples} samples differ",
    }


def test_a_completion_gets_the_header_that_it_leaves_out(verilog_eval: Path) -> None:
    problem = load_problems(verilog_eval / "dataset_code-complete-iccad2023", limit=1)[0]
    for code in ("  assign zero = 0;\nendmodule\n", "module TopModule(output zero);\n  assign zero = 0;\nendmodule\n"):
        assert grade(GradeTask(problem, 0, code)).verdict == "pass"


def test_a_missing_simulator_is_a_harness_error(problems: dict[str, Problem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = grade(GradeTask(problems[DFF8], 0, GOOD, sandbox="none"))
    assert (found.verdict, found.letter) == ("harness_error", "")
    assert "iverilog is not on PATH" in found.detail and "apt-get install iverilog" in found.detail


def test_a_sandbox_that_breaks_is_a_harness_error(problems: dict[str, Problem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = grade(GradeTask(problems[DFF8], 0, GOOD, sandbox="bubblewrap"))
    assert (found.verdict, found.letter) == ("harness_error", "")
    assert "No permissions" in found.detail


@pytest.mark.parametrize(
    ("log", "letter"),
    [
        ("Mismatches: 0 in 20 samples\n", "."),
        ("Mismatches: 3 in 20 samples\n", "R"),
        ("", "R"),
        ("TIMEOUT\nMismatches: 0 in 20 samples\n", "T"),
        ("dut.sv:3: error: This assignment requires an explicit cast.\n1 error(s) during elaboration.\n", "e"),
        ("dut.sv:3: error: Unable to bind wire/reg/memory `x' in `tb'\nUnknown module type: y\n", "m"),
        ("dut.sv:3: error: Unable to bind wire/reg/memory `x' in `tb'\n", "p"),
        ("dut.sv:3: error: Unable to bind wire/reg/memory `clk' in `tb'\n", "c"),
        ("dut.sv:3: error: something\ndut.sv:4: syntax error\n", "S"),
        ("dut.sv:4: syntax error\nUnknown module type: y\n", "S"),
        ("Mismatches: 0 in 20 samples\nMismatches: 9 in 20 samples\n", "."),
        ("Mismatches: 0 in 20 samples, I think\n", "R"),
        (" Mismatches: 0 in 20 samples\n", "R"),
    ],
)
def test_the_log_is_read_in_upstreams_order(log: str, letter: str) -> None:
    """Expected letters worked out by hand from upstream's sv-iv-analyze."""
    assert official_letter(log, "module TopModule; endmodule") == letter


def test_the_papers_rules_pass_what_the_official_ones_do_not(problems: dict[str, Problem]) -> None:
    official = grade(reference_task(problems["Prob082_lfsr32"], Limits()))
    paper = grade(reference_task(problems["Prob082_lfsr32"], Limits(), rules="paper"))
    assert (official.verdict, paper.verdict, paper.letter) == ("timeout", "pass", "T")
    assert paper_passes(True, 0, False, "nothing of note") and not paper_passes(True, 0, False, "ERROR: x")
    assert not paper_passes(True, 0, False, "Mismatches: 0 in 0 samples") and not paper_passes(False, 0, False, "")


# Under 12.0: upstream's issue 21 for three benches, pull request 16 for Prob099. 11.0 cannot elaborate the references of two more.
CANNOT_PASS = {
    "12.0": {"Prob082_lfsr32": "T", "Prob099_m2014_q6c": "C", "Prob141_count_clock": "T", "Prob156_review2015_fancytimer": "T"},
    "11.0": {
        "Prob082_lfsr32": "T",
        "Prob099_m2014_q6c": "C",
        "Prob141_count_clock": "T",
        "Prob151_review2015_fsm": "C",
        "Prob156_review2015_fancytimer": "C",
    },
}


@pytest.mark.slow
def test_all_references_get_what_the_official_analysis_gives_them(problems: dict[str, Problem]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        grades = list(pool.map(grade, [reference_task(p, Limits()) for p in problems.values()]))
    version = grades[0].simulator.split()[3]
    if version not in CANNOT_PASS:
        pytest.skip(f"no record for Icarus Verilog {version}")
    assert {g.task_id: g.letter for g in grades if g.verdict != "pass"} == CANNOT_PASS[version]
    assert all(g.samples_taken for g in grades if g.verdict == "pass")

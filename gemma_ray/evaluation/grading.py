"""Compile and simulate one sample against its problem, and name what came of it.

    program → reads files it must not?  → iverilog → vvp → log → official letter → was the result line the bench's own?

The commands, their order and the limit are VerilogEval's (`Makefile.in`), and so is the letter. Three things are added, because under those
rules a program that prints `Mismatches: 0 in 20 samples` and calls `$finish` passes:

- The bench's result line carries a secret. Each run compiles the bench with a random word put into its format string, and the word is taken
  out of the log before the official analysis reads it. A result line without the word came from the program. The program cannot learn the
  word: the simulation runs in an empty folder, and file names must be plain relative literals.
- The bench's own line must count as many samples as it does with the reference in the program's place (`GradeTask.expected_samples`):
  fewer, and the simulation was ended early.
- A passing program must not use the bench's scopes (`scrutiny.reaches_into_bench`).

Printing and finishing are not offences by themselves: a module with a `$display` in it passes officially, and here.
"""

from __future__ import annotations

import functools
import re
import secrets
import shutil
import signal
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from gemma_ray.evaluation import scrutiny
from gemma_ray.evaluation.benchmarks import RESULT_FORMAT, Problem
from gemma_ray.evaluation.extraction import TOP, declares_top
from gemma_ray.evaluation.official import RESULT_LINE, VERDICT_OF_LETTER, Verdict, log_lines, official_letter, paper_passes
from gemma_ray.evaluation.sandbox import Limits, Outcome, SandboxError, SandboxKind, run_limited, sandbox_kind
from gemma_ray.icarus import COMPILE, INSTALL

COMPILE_BENCH = (*COMPILE, "-s", "tb", "-o", "sim", "dut.sv", "test.sv", "ref.sv")
# Upstream starts the compiled file itself, which is `vvp sim`; -n makes $stop end the simulation instead of waiting at a prompt.
SIMULATE = ("vvp", "-n")


@dataclass(frozen=True)
class GradeTask:
    """One sample to grade; plain data, so that it travels to another process or host."""

    problem: Problem
    sample: int
    code: str | None
    expected_samples: int | None = None
    limits: Limits = field(default_factory=Limits)
    rules: str = "official"
    sandbox: SandboxKind | None = None


@dataclass(frozen=True)
class Grade:
    """What came of one sample. `letter` is VerilogEval's; "" when the program was not run."""

    task_id: str
    sample: int
    verdict: Verdict
    letter: str
    detail: str
    samples_taken: int | None = None
    simulator: str = ""
    sandbox: SandboxKind = "none"

    def to_json(self) -> dict[str, object]:
        keys = ("task_id", "sample", "verdict", "letter", "detail")
        return {key: getattr(self, key) for key in keys}


@dataclass(frozen=True)
class _Run:
    """A compiled and simulated program: both logs without the secret, and what the bench itself reported."""

    compiled: Outcome
    simulated: Outcome | None
    log: str
    bench_results: list[tuple[int, int]]
    foreign_results: int


def grade(task: GradeTask) -> Grade:
    """Grade one sample. Never raises for what the program does; a fault of ours or of the machine is the verdict `harness_error`."""
    try:
        missing = [tool for tool in (COMPILE[0], SIMULATE[0]) if shutil.which(tool) is None]
        if missing:
            return Grade(task.problem.task_id, task.sample, "harness_error", "", f"{missing[0]} is not on PATH: {INSTALL}")
        kind = task.sandbox or sandbox_kind()
        verdict, letter, detail, taken = _grade(task, kind)
        return Grade(task.problem.task_id, task.sample, verdict, letter, detail, taken, simulator_version() or "", kind)
    except (SandboxError, OSError) as e:
        return Grade(task.problem.task_id, task.sample, "harness_error", "", f"{type(e).__name__}: {e}"[:500])


def reference_task(problem: Problem, limits: Limits, rules: str = "official") -> GradeTask:
    """The problem's own reference as the sample: what it gets is what the best program can get, and its sample count is the bench's."""
    return GradeTask(problem, -1, re.sub(r"\bRefModule\b", TOP, problem.reference), limits=limits, rules=rules)


def simulator_version() -> str | None:
    """Icarus Verilog's name and version as it prints them (`Icarus Verilog version 11.0 (stable)`); None when it is not on PATH."""
    program = shutil.which(COMPILE[0])
    return _version_of(program) if program and shutil.which(SIMULATE[0]) else None


@functools.cache
def _version_of(program: str) -> str:
    with tempfile.TemporaryDirectory(prefix="gemma-ray-") as folder:
        text = run_limited([program, "-V"], Path(folder), Limits(cpu_s=10), kind="none").output
    first = next((line for line in text.splitlines() if line.startswith("Icarus")), "unknown")
    return first.removesuffix(" ()").strip()


def _grade(task: GradeTask, kind: SandboxKind) -> tuple[Verdict, str, str, int | None]:
    if task.code is None or not task.code.strip():
        return "no_code", "", "no Verilog in the completion", None
    problem = task.problem
    # A completion of a given header leaves the header out.
    code = task.code if problem.interface is None or declares_top(task.code) else f"{problem.interface.rstrip()}\n{task.code}"
    with tempfile.TemporaryDirectory(prefix="gemma-ray-grade-") as folder:
        build, run_folder = Path(folder, "build"), Path(folder, "run")
        build.mkdir()
        run_folder.mkdir()
        (build / "dut.sv").write_text(code, encoding="utf-8", errors="replace")
        expanded = _expand(code, build, task.limits, kind)
        violation = scrutiny.outside_include(code) or scrutiny.outside_file(expanded, problem.bench)
        if violation and kind == "none":
            return "sandbox_violation", "", f"{violation} (not run: no sandbox on this machine)", None
        run = _run(problem, build, run_folder, task.limits, kind)
    letter = official_letter(run.log, code)
    taken = run.bench_results[-1][1] if run.bench_results else None
    if violation:
        return "sandbox_violation", letter, violation, taken
    spoof = _spoof(run, task.expected_samples)
    if spoof is None and letter == ".":
        spoof = "an open comment runs into the bench" if scrutiny.has_open_comment(code) else None
        spoof = spoof or scrutiny.reaches_into_bench(expanded, problem.bench, problem.reference, TOP)
    if spoof:
        return "spoofed", letter, spoof, taken
    verdict = _verdict(letter, run, task.rules)
    return verdict, letter, _detail(verdict, run, task.limits), taken


def _expand(code: str, build: Path, limits: Limits, kind: SandboxKind) -> str:
    """The program with its macros expanded and its comments gone; as written when it has no macros, or when the preprocessor refuses it."""
    if "`" in code and scrutiny.outside_include(code) is None:
        outcome = run_limited([COMPILE[0], "-E", "-o", "expanded", "dut.sv"], build, limits, kind=kind, readable=_installation())
        expanded = build / "expanded"
        if outcome.exit_code == 0 and expanded.exists():
            return scrutiny.without_comments(expanded.read_text(encoding="utf-8", errors="replace"))
    return scrutiny.without_comments(code)


def _run(problem: Problem, build: Path, run_folder: Path, limits: Limits, kind: SandboxKind) -> _Run:
    secret = secrets.token_hex(16)
    (build / "test.sv").write_text(problem.bench.replace(RESULT_FORMAT, f'"{secret}{RESULT_FORMAT[1:]}'), encoding="utf-8")
    (build / "ref.sv").write_text(problem.reference, encoding="utf-8")
    compiled = run_limited(COMPILE_BENCH, build, limits, kind=kind, readable=_installation())
    simulated = None
    if (build / "sim").exists() and compiled.stopped is None:
        command = [*SIMULATE, str((build / "sim").resolve())]
        simulated = run_limited(command, run_folder, limits, kind=kind, readable=[build, *_installation()])
    log = compiled.output + (simulated.output if simulated else "")
    if compiled.stopped or (simulated and simulated.stopped) or _CPU_LIMIT_NOTE in compiled.output:
        log += "\nTIMEOUT\n"
    lines = log_lines(log)
    own = [RESULT_LINE.match(line.removeprefix(secret)) for line in lines if line.startswith(secret)]
    foreign = sum(RESULT_LINE.match(line) is not None for line in lines)
    return _Run(compiled, simulated, log.replace(secret, ""), [(int(m[1]), int(m[2])) for m in own if m], foreign)


# The compiler is a chain of processes: the shell between them says so when one of them passes the limit.
_CPU_LIMIT_NOTE = "CPU time limit exceeded"


def _installation() -> list[Path]:
    """The simulator's own folder when it lies under /tmp, which the sandbox empties."""
    program = shutil.which(COMPILE[0])
    prefix = Path(program).resolve().parent.parent if program else Path("/usr")
    return [prefix] if prefix.is_relative_to("/tmp") else []


def _spoof(run: _Run, expected_samples: int | None) -> str | None:
    if run.foreign_results:
        return "the program printed a result line of its own"
    if run.simulated is None or run.simulated.stopped or not run.bench_results:
        return None
    taken = run.bench_results[-1][1]
    if taken == 0 or (expected_samples is not None and taken < expected_samples):
        return f"the simulation ended after {taken} of the bench's {expected_samples or 'own'} samples"
    return None


def _verdict(letter: str, run: _Run, rules: str) -> Verdict:
    official = VERDICT_OF_LETTER[letter]
    if rules == "official":
        return official
    passes = run.simulated is not None and paper_passes(
        True, run.simulated.exit_code, run.simulated.stopped is not None, run.simulated.output
    )
    return "pass" if passes else "mismatch" if official == "pass" else official


def _detail(verdict: Verdict, run: _Run, limits: Limits) -> str:
    """One line that says why, from the log."""
    stopped = run.compiled.stopped or (run.simulated.stopped if run.simulated else None)
    if stopped == "output":
        return f"stopped after printing {limits.output_bytes >> 20} MiB"
    if stopped == "time":
        return f"stopped at the limit of {limits.cpu_s:g} s"
    lines = log_lines(run.log)
    if verdict == "timeout":
        return "the bench printed TIMEOUT: its stimulus does not end in its own limit"
    if run.bench_results and verdict in ("pass", "mismatch", "reset_style"):
        mismatches, samples = run.bench_results[-1]
        return f"{mismatches} of {samples} samples differ"
    if verdict in ("mismatch", "reset_style", "pass"):
        end = run.simulated or run.compiled
        crash = f" ({signal.Signals(end.exit_code - 128).name})" if end.exit_code - 128 in set(signal.Signals) else ""
        return f"{'no result line' if run.simulated else 'not compiled'}: exit status {end.exit_code}{crash}"
    telling = ("error:", "sorry:", "syntax error", "Unknown module", "sensitivities", "Unable to bind", "declared here as wire", "error")
    return next((line.strip()[:300] for word in telling for line in lines if word in line), "")

"""Training examples that give an evaluation's problems away.

A problem's prompt and reference module are sets of runs (`gemma_ray.data.grams`), less those that more than two problems share. An example
leaks a problem when it holds at least half of either set: found with names, comments and layout changed, or amid other text.

VerilogEval's runs come with the package, as numbers that its texts cannot be read back from, so that a leak is found where the benchmark is
not at hand; `python -m gemma_ray.data.contamination FOLDER` makes them again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from gemma_ray.artifacts import fingerprint
from gemma_ray.data.grams import modules, token_runs, word_runs
from gemma_ray.errors import DataError
from gemma_ray.evaluation.benchmarks import Problem, load_problems

VERILOG_EVAL = "verilog-eval"
"""The name that stands for the benchmark's shipped runs."""
SHIPPED = Path(__file__).with_name("verilog_eval_runs.npz")

SHARED_BY = 2
"""A run of more problems than this is how they are all put, and no sign of one."""
LEAKS = 0.5
"""Share of a problem's runs that an example must hold."""

LOW_BITS = (1 << 20) - 1


@dataclass(frozen=True)
class Runs:
    """The runs of a benchmark's problems, sorted, and whose each is: what there is of one kind."""

    runs: np.ndarray
    owners: np.ndarray
    sizes: np.ndarray

    @cached_property
    def _low_bits(self) -> np.ndarray:
        """[2^20] bool: low bits that a run has; they tell nearly all other runs apart at a look."""
        table = np.zeros(LOW_BITS + 1, bool)
        table[self.runs & np.uint64(LOW_BITS)] = True
        return table

    def leak(self, found: np.ndarray) -> tuple[int, float] | None:
        """The problem that most of is in some runs, and how much; None when no problem is by `LEAKS`."""
        found = found[self._low_bits[found & np.uint64(LOW_BITS)]]
        if not len(found):
            return None
        places = np.minimum(np.searchsorted(self.runs, found), len(self.runs) - 1)
        shared = np.unique(found[self.runs[places] == found])
        if not len(shared):
            return None
        spans = zip(np.searchsorted(self.runs, shared), np.searchsorted(self.runs, shared, "right"), strict=True)
        hits = np.concatenate([self.owners[first:end] for first, end in spans])
        shares = np.bincount(hits, minlength=len(self.sizes)) / np.maximum(self.sizes, 1)
        problem = int(shares.argmax())
        return (problem, float(shares[problem])) if shares[problem] >= LEAKS else None


@dataclass(frozen=True)
class Benchmark:
    """A set of problems to keep out of training."""

    name: str
    problems: tuple[str, ...]
    prompts: Runs
    references: Runs

    def leak(self, asked: np.ndarray, code: np.ndarray) -> str | None:
        """What an example gives away, in words; `asked` are the runs of its questions' words, `code` those of its modules' tokens."""
        for kind, of, runs in (("prompt", asked, self.prompts), ("reference module", code, self.references)):
            if found := runs.leak(of):
                return f"{found[1]:.0%} of the {kind} of {self.problems[found[0]]} ({self.name})"
        return None

    def fingerprint(self) -> str:
        """Changes when a run does."""
        return fingerprint([self.name, self.problems, self.prompts.runs.tolist(), self.references.runs.tolist()])


def benchmark(name: str) -> Benchmark:
    """The benchmark of a folder in VerilogEval's layout, or `VERILOG_EVAL` as it comes with the package. Raises DataError for neither."""
    if name == VERILOG_EVAL:
        with np.load(SHIPPED) as kept:
            runs = {key: kept[key] for key in kept.files}
        prompts, references = (
            Runs(runs[f"{kind}_runs"], runs[f"{kind}_owners"], runs[f"{kind}_sizes"]) for kind in ("prompt", "reference")
        )
        return Benchmark(name, tuple(runs["problems"].tolist()), prompts, references)
    try:
        problems = load_problems(Path(name).expanduser())
    except DataError as e:
        raise DataError(f"data.decontaminate: {e}; data.decontaminate=[] goes without") from e
    return of_problems(Path(name).name, problems)


def of_problems(name: str, problems: Sequence[Problem]) -> Benchmark:
    """The runs of problems."""
    prompts = _runs([np.unique(word_runs(problem.prompt)) for problem in problems])
    references = _runs([np.unique(token_runs(modules(problem.reference))) for problem in problems])
    return Benchmark(name, tuple(problem.task_id for problem in problems), prompts, references)


def _runs(sets: list[np.ndarray]) -> Runs:
    runs = np.concatenate(sets)
    owners = np.repeat(np.arange(len(sets), dtype=np.int32), [len(found) for found in sets])
    distinct, counts = np.unique(runs, return_counts=True)
    kept = np.isin(runs, distinct[counts <= SHARED_BY])
    order = np.argsort(runs[kept], kind="stable")
    owners = owners[kept]
    return Runs(runs[kept][order], owners[order], np.bincount(owners, minlength=len(sets)).astype(np.int32))


def write_runs(found: Benchmark, path: Path) -> None:
    """Keep a benchmark's runs, without its texts."""
    kinds = {"prompt": found.prompts, "reference": found.references}
    arrays = {f"{kind}_{part}": getattr(runs, part) for kind, runs in kinds.items() for part in ("runs", "owners", "sizes")}
    np.savez_compressed(path, allow_pickle=False, problems=np.array(found.problems), **arrays)


if __name__ == "__main__":
    write_runs(of_problems(VERILOG_EVAL, load_problems(Path(sys.argv[1]))), SHIPPED)

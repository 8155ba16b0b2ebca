"""Problems in VerilogEval's layout.

A problem is three files that share a stem, and in the code-completion task a fourth:

    Prob001_zero_prompt.txt   what the model is asked
    Prob001_zero_test.sv      the bench: module `tb`, which runs `TopModule` beside `RefModule` and prints `Mismatches: M in N samples`
    Prob001_zero_ref.sv       `RefModule`
    Prob001_zero_ifc.txt      the module header, which a completion leaves out

Layout and names: https://github.com/NVlabs/verilog-eval (v2).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gemma_ray.errors import DataError

RESULT_FORMAT = '"Mismatches: '
SPEC_TO_RTL = "dataset_spec-to-rtl"
_PARTS = ("prompt.txt", "test.sv", "ref.sv")


@dataclass(frozen=True)
class Problem:
    """One problem, as text: a grader on another host needs no files."""

    task_id: str
    prompt: str
    bench: str
    reference: str
    interface: str | None = None


def find_problem_folder(folder: Path) -> Path:
    """The folder that holds the problems: `folder`, or the specification-to-RTL task when `folder` is the benchmark's root.

    Raises DataError when `folder` does not exist.
    """
    if not os.path.isdir(folder):  # noqa: PTH112 - Path.is_dir raises for a name that is too long
        raise DataError(f"no folder '{folder}'. eval.dataset is a folder of ProbNNN_name_prompt.txt, _test.sv and _ref.sv files")
    inner = folder / SPEC_TO_RTL
    return inner if inner.is_dir() and not any(folder.glob("*_prompt.txt")) else folder


def load_problems(folder: Path, limit: int | None = None) -> list[Problem]:
    """The problems of a folder by name, the first `limit` of them.

    Raises DataError for a missing folder, a folder without problems, a problem that lacks one of its files or whose file is not text, and a
    bench that prints no result line.
    """
    folder = find_problem_folder(folder)
    stems = sorted({f.name.removesuffix(f"_{part}") for part in _PARTS for f in folder.glob(f"*_{part}")})
    if not stems:
        raise DataError(f"{folder}: no problems. A problem is ProbNNN_name_prompt.txt, _test.sv and _ref.sv")
    return [_load(folder, stem) for stem in stems[:limit]]


def _load(folder: Path, stem: str) -> Problem:
    prompt, bench, reference = (_read(folder / f"{stem}_{part}", stem) for part in _PARTS)
    if RESULT_FORMAT not in bench:
        raise DataError(
            f'{folder}: {stem}_test.sv has no $display({RESULT_FORMAT}%1d in %1d samples", ...), the line that results are read from'
        )
    interface = folder / f"{stem}_ifc.txt"
    return Problem(stem, prompt, bench, reference, _read(interface, stem) if interface.exists() else None)


def _read(path: Path, stem: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{path.parent}: problem {stem} has no {path.name}") from None
    except UnicodeDecodeError as e:
        raise DataError(f"{path}: not UTF-8 text ({e.reason} at byte {e.start})") from e
    except OSError as e:
        raise DataError(f"{path}: cannot be read ({e.strerror})") from e

"""Typed reading of a run's artifacts.

A run holds any part of the artifacts that `RunPaths` names: what is missing is None here and "not run" on the page. What is there and
cannot be read is an error that names the file: a report that leaves a damaged artifact out looks like that of a run which never made it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from gemma_ray.artifacts import RunPaths
from gemma_ray.errors import InputError
from gemma_ray.reporting.views import BenchCell, EvalSummary, Manifest, Sample, Step, Timings, Verification, View

T = TypeVar("T")
V = TypeVar("V", bound=View)

MOST_LEVELS = 64
TOO_DEEP = f"nested more than {MOST_LEVELS} levels deep"


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a run: its summary and its graded samples."""

    summary: EvalSummary
    samples: list[Sample]


@dataclass(frozen=True)
class RecipeText:
    """recipe.yaml: as written, and as a mapping."""

    text: str
    values: dict[str, Any]

    def get(self, section: str, key: str) -> Any:
        """A key of a section, None where either is missing."""
        found = self.values.get(section)
        return found.get(key) if isinstance(found, dict) else None

    @property
    def emulated(self) -> bool:
        return self.get("cluster", "emulate") is True

    @property
    def usd_per_hour(self) -> float | None:
        price = self.get("cost", "usd_per_hour")
        return float(price) if isinstance(price, int | float) and not isinstance(price, bool) and 0 <= price <= 1e15 else None


@dataclass(frozen=True)
class Run:
    """A run's artifacts, and its place among the runs of the report."""

    path: Path
    name: str
    index: int
    recipe: RecipeText | None
    metrics: list[Step] | None
    manifest: Manifest | None
    verification: Verification | None
    before: Evaluation | None
    after: Evaluation | None
    bench: list[BenchCell] | None
    timings: Timings | None
    versions: dict[str, Any] | None

    @property
    def letter(self) -> str:
        """Stands for the run in plots: A, B, ..."""
        return chr(ord("A") + self.index) if self.index < 26 else str(self.index + 1)

    @property
    def emulated(self) -> bool:
        return self.recipe is not None and self.recipe.emulated


def read_runs(folders: list[Path]) -> list[Run]:
    """Read run folders, named by as much of their path as tells them apart.

    Raises InputError for a folder that does not exist or holds no artifact of a run, and for a damaged artifact.
    """
    if not folders:
        raise InputError("name at least one run folder")
    resolved = [Path(os.path.realpath(folder)) for folder in folders]  # a loop of links is no error here
    if len(set(resolved)) != len(resolved):
        raise InputError("the same run is named twice")
    depth = 1
    while len({path.parts[-depth:] for path in resolved}) != len(resolved):
        depth += 1
    names = ["/".join(path.parts[-depth:]) for path in resolved]
    return [_read_run(folder, name, i) for i, (folder, name) in enumerate(zip(folders, names, strict=True))]


def _read_run(folder: Path, name: str, index: int) -> Run:
    if not folder.is_dir():
        raise InputError(f"no run folder '{folder}'")
    paths = RunPaths(folder)
    run = Run(
        path=folder,
        name=name,
        index=index,
        recipe=_read(paths.recipe, _recipe),
        metrics=_read(paths.metrics, lambda text: _lines(Step, text)),
        manifest=_read(paths.manifest, lambda text: Manifest.model_validate(_json(text))),
        verification=_read(paths.verify, lambda text: Verification.model_validate(_json(text))),
        before=_evaluation(paths.eval_base),
        after=_evaluation(paths.eval),
        bench=_bench(paths.bench),
        timings=_read(paths.timings, lambda text: Timings.model_validate(_json(text))),
        versions=_read(folder / "versions.json", _mapping),
    )
    parts = (run.metrics, run.manifest, run.verification, run.before, run.after, run.bench, run.timings, run.versions)
    if run.recipe is None and all(part is None for part in parts):
        raise InputError(f"'{folder}' holds no artifact of a run; name a folder that a stage wrote into (run.dir)")
    return run


def _read(path: Path, parse: Callable[[str], T]) -> T | None:
    """What `parse` makes of a file, None when there is none. Raises InputError, in one line, for a file it cannot make anything of."""
    if not path.is_file():
        _refuse_other(path, "file", os.path.lexists(path))
        _refuse_other(path.parent, "folder", os.path.lexists(path.parent) and not path.parent.is_dir())
        return None
    try:
        return parse(path.read_text(encoding="utf-8"))
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{path} is damaged: {where + ': ' if where else ''}{first['msg']}") from e
    except yaml.YAMLError as e:
        raise InputError(f"{path} is damaged: not YAML") from e
    except RecursionError as e:
        raise InputError(f"{path} is damaged: {TOO_DEEP}") from e
    except (ValueError, OSError) as e:
        raise InputError(f"{path} is damaged: {' '.join(str(e).split())}") from e


def _refuse_other(path: Path, kind: str, other: bool) -> None:
    if other:
        raise InputError(f"{path} is damaged: not a {kind}")


def _json(text: str) -> Any:
    value = json.loads(text)
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    """Raise ValueError for what is nested beyond any artifact's need, or in itself (YAML's aliases): it would end Python's stack."""
    level = [value]
    for _ in range(MOST_LEVELS):
        inner = [v for v in level if isinstance(v, dict | list)]
        level = list({id(w): w for v in inner for w in (v.values() if isinstance(v, dict) else v)}.values())
    if level:
        raise ValueError(TOO_DEEP)


def _lines(view: type[V], text: str) -> list[V]:
    """The lines of a JSON Lines file. A last line that a kill cut short is left out: what is above it is whole."""
    *complete, tail = text.split("\n")
    found = []
    for number, line in enumerate(complete, 1):
        if line.strip():
            try:
                found.append(view.model_validate(_json(line)))
            except (json.JSONDecodeError, ValidationError, RecursionError) as e:
                raise ValueError(f"line {number}: {e.errors()[0]['msg'] if isinstance(e, ValidationError) else 'not JSON'}") from e
    if tail.strip():
        with contextlib.suppress(ValueError, RecursionError):  # ValidationError is a ValueError
            found.append(view.model_validate(_json(tail)))
    return found


def _mapping(text: str) -> dict[str, Any]:
    value = _json(text)
    if not isinstance(value, dict):
        raise ValueError("not a mapping")
    return value


def _recipe(text: str) -> RecipeText:
    values = yaml.safe_load(text)
    if not isinstance(values, dict):
        raise ValueError("not a mapping of sections")
    _check_depth(values)
    return RecipeText(text, values)


def _evaluation(folder: Path) -> Evaluation | None:
    summary = _read(folder / "summary.json", lambda text: EvalSummary.model_validate(_json(text)))
    if summary is None:
        return None
    return Evaluation(summary, _read(folder / "results.jsonl", lambda text: _lines(Sample, text)) or [])


def _bench(folder: Path) -> list[BenchCell] | None:
    _refuse_other(folder, "folder", os.path.lexists(folder) and not folder.is_dir())
    files = sorted(p for p in folder.glob("*.json") if not p.name.startswith(".")) if folder.is_dir() else []
    cells = [_read(file, lambda text: BenchCell.model_validate(_json(text))) for file in files]
    return sorted((c for c in cells if c), key=lambda c: (c.context, c.qps)) or None

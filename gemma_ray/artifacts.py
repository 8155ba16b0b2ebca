"""Where a run keeps its artifacts, and how they are written so that a kill leaves only whole ones.

A run is a folder. Each stage writes one file or folder of it (`RunPaths` is the table), first under a temporary name beside the target and
then renamed: an artifact that exists is whole. `stage_done` adds a record of what the artifact was made from, so that a second start
skips finished stages and refuses to mix two recipes in one run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunPaths:
    """The artifacts of one run by name; see `docs/architecture.md` for what is in each."""

    root: Path

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yaml"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def manifest(self) -> Path:
        return self.data / "manifest.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def verify(self) -> Path:
        return self.root / "verify.json"

    @property
    def eval(self) -> Path:
        return self.root / "eval"

    @property
    def eval_base(self) -> Path:
        return self.root / "eval-base"

    @property
    def bench(self) -> Path:
        return self.root / "bench"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def timings(self) -> Path:
        return self.root / "timings.json"

    @property
    def stages(self) -> Path:
        return self.root / ".stages"


def fingerprint(value: Any) -> str:
    """16 hex digits that change when `value` (anything JSON can hold) changes."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex, read in 1 MiB blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all (temporary file in the same folder, fsync, rename)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of `value` as indented JSON."""
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")


def read_json(path: Path) -> Any:
    """The JSON document in a file."""
    return json.loads(path.read_text(encoding="utf-8"))


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` when the block ends well, and is removed when it does not.

    An existing `target` is replaced only at the end. Leftovers of killed attempts are removed first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f".{target.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if target.exists():
        old = target.with_name(f".{target.name}.old.{os.getpid()}.tmp")
        target.replace(old)
        temporary.replace(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.replace(target)


def stage_done(paths: RunPaths, stage: str, made_from: Any) -> bool:
    """Whether `stage` finished in this run from exactly `made_from`."""
    record = paths.stages / f"{stage}.json"
    return record.exists() and read_json(record)["made_from"] == fingerprint(made_from)


def mark_stage_done(paths: RunPaths, stage: str, made_from: Any) -> None:
    """Record that `stage` finished from `made_from`; call it after the stage's artifact is in place."""
    write_json(paths.stages / f"{stage}.json", {"made_from": fingerprint(made_from)})

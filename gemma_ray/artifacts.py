"""Where a run keeps its artifacts, and how they are written so that a kill leaves only whole ones.

A run is a folder. Each stage writes one file or folder of it (`RunPaths` is the table), first under a temporary name beside the target and
then renamed: an artifact that exists is whole. `mark_stage_done` adds a record of what the artifact was made from and of its files, so that
a second start skips what is finished and makes again what was damaged since.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import secrets
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


@contextlib.contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """Yield a temporary name in `target`'s folder; the file written there becomes `target`, synced, when the block ends well."""
    temporary = _temporary_beside(target)
    try:
        yield temporary
        with temporary.open("rb") as f:
            os.fsync(f.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


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
    temporary = _temporary_beside(target)
    _remove_leftovers(target)
    temporary.mkdir()
    try:
        yield temporary
        put_in_place(temporary, target)
    except BaseException:
        _remove(temporary)
        raise


def put_in_place(temporary: Path, target: Path) -> None:
    """Rename a finished folder to `target`. A folder cannot be renamed over a full one, so the old one steps aside first."""
    if not target.exists():
        temporary.replace(target)
        return
    old = _temporary_beside(target)
    target.replace(old)
    try:
        temporary.replace(target)
    except BaseException:
        old.replace(target)
        raise
    _remove(old)


_TOKEN = secrets.token_hex(4)
_SERIAL = itertools.count()


def _this_process() -> str:
    """The process id, and a random part: a container that starts again often has the same id."""
    return f"{os.getpid()}-{_TOKEN}"


def _temporary_beside(target: Path) -> Path:
    """A fresh hidden name in `target`'s folder, which is made. It says which process it belongs to."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return target.with_name(f".{target.name}.{_this_process()}-{next(_SERIAL)}.tmp")


def _remove_leftovers(target: Path) -> None:
    """Remove what processes that have ended left under `target`'s temporary names; another living process keeps its own."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.((\d+)-[0-9a-f]{{8}})-\d+\.tmp")
    for entry in target.parent.iterdir():
        match = pattern.fullmatch(entry.name)
        if match and match[1] != _this_process() and (int(match[2]) == os.getpid() or not _is_running(int(match[2]))):
            _remove(entry)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def stage_done(paths: RunPaths, stage: str, made_from: Any, artifact: Path) -> bool:
    """Whether `stage` finished in this run from exactly `made_from`, and its artifact still has every file it had, in full length."""
    try:
        record = read_json(paths.stages / f"{stage}.json")
        return record["made_from"] == fingerprint(made_from) and record["files"] == _inventory(artifact)
    except (OSError, ValueError, KeyError, TypeError):  # no record, or a damaged one
        return False


def mark_stage_done(paths: RunPaths, stage: str, made_from: Any, artifact: Path) -> None:
    """Record that `stage` finished from `made_from`; call it after the artifact, a file or a folder, is in place."""
    write_json(paths.stages / f"{stage}.json", {"made_from": fingerprint(made_from), "files": _inventory(artifact)})


def forget_stage(paths: RunPaths, stage: str) -> None:
    """Take back `mark_stage_done`; call it before the artifact changes."""
    (paths.stages / f"{stage}.json").unlink(missing_ok=True)


def _inventory(artifact: Path) -> dict[str, int]:
    """Bytes of every file of an artifact."""
    files = [path for path in artifact.rglob("*") if path.is_file()] if artifact.is_dir() else [artifact]
    return {str(path.relative_to(artifact.parent)): path.stat().st_size for path in sorted(files)}


@contextlib.contextmanager
def alone(lock: Path, wait: bool = False) -> Iterator[None]:
    """Hold a lock for the time of the block; other processes that ask for it wait, or get a BlockingIOError."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield

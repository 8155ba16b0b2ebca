"""What the cache of compilations keeps and mistrusts, and what is said of a compiler that fails, with scripts in the compiler's place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_plan import FOUND, JOB

from gemma_ray.errors import CompileError, StageError
from gemma_ray.planning import compiler
from gemma_ray.planning.compiler import compiled


def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """Runs instead of Python: $3 is the job, $4 the result; each run leaves a line in `runs`."""
    python, runs = tmp_path / "python", tmp_path / "runs"
    python.write_text(f"#!/bin/bash\necho run >> {runs}\n{body}\n")
    python.chmod(0o755)
    monkeypatch.setattr(compiler, "plan_python", lambda *_: python)
    return runs


def compile_once(tmp_path: Path) -> Any:
    return compiled(JOB, "v5p-8", tmp_path / "cache", print)


def test_what_was_compiled_is_kept_and_what_is_damaged_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made.json").write_text(json.dumps(FOUND.to_json()))
    runs = script(tmp_path, monkeypatch, f"cp {tmp_path / 'made.json'} $4")
    assert compile_once(tmp_path) == compile_once(tmp_path) == FOUND
    assert len(runs.read_text().split()) == 1
    (kept,) = (tmp_path / "cache" / "plans").glob("*.json")
    whole = FOUND.to_json()
    damaged = [{**whole, "cycles": "many"}, {**whole, "temporary_bytes": None}, {**whole, "cycles": float("nan")}, [], {}, {"refused": 1}]
    for n, document in enumerate(damaged, start=2):
        kept.write_text(json.dumps(document))
        assert compile_once(tmp_path) == FOUND
        assert len(runs.read_text().split()) == n


def test_a_refusal_is_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "total memory required for HLO temporaries (25.22P) exceeds available HBM (95.00G)"
    runs = script(tmp_path, monkeypatch, f"echo '{said}'; exit 1")
    for _ in range(2):
        with pytest.raises(CompileError, match=r"does not compile for v5p 2x2x1: A chip would need .* has 95.0 GiB.*train\.remat"):
            compile_once(tmp_path)
    assert len(runs.read_text().split()) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("kill -9 $$", "was ended by SIGKILL, most likely for want of memory"),
        ("echo 'ValueError: the cause'; echo 'a note'; exit 1", "exit code 1: ValueError: the cause"),
        ("echo 'only words'; exit 3", "exit code 3: only words"),
        ("exit 0", "exit code 0: it said nothing"),
    ],
)
def test_a_compiler_that_fails_is_quoted_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str) -> None:
    runs = script(tmp_path, monkeypatch, body)
    for _ in range(2):
        with pytest.raises(StageError, match=message):
            compile_once(tmp_path)
    assert len(runs.read_text().split()) == 2

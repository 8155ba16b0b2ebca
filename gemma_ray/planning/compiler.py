"""Compiles a job in the plan environment, once: the same job again is read from the cache.

    job ─► process of the plan environment: the job's module ─► result, kept in cache/plans/<key>.json

The key covers the job, the compiler's environment and the source of everything that the program is made from.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache as once
from pathlib import Path
from typing import Any, TypeVar

from gemma_ray.artifacts import alone, file_sha256, fingerprint, read_json, write_json
from gemma_ray.errors import CompileError, StageError, ToolError
from gemma_ray.planning.environment import compile_environment, last_words, plan_python
from gemma_ray.planning.explain import explain
from gemma_ray.planning.job import Compiled, CompiledForward, CompileJob, ForwardJob

PACKAGE = Path(__file__).resolve().parent.parent
READERS = ("ahead", "child", "compile_step", "compile_forward", "explain", "hlo", "hlo_text", "job", "sizes")
SOURCES = ("models", "training", *(f"planning/{name}.py" for name in READERS), "section.py", "errors.py")
PROGRESS_INTERVAL_S = 20.0
R = TypeVar("R", Compiled, CompiledForward)

_running: set[subprocess.Popen[bytes]] = set()


def compiled(job: CompileJob, pod_type: str, cache: Path, progress: Callable[[str], None]) -> Compiled:
    """What XLA:TPU says of a training step; from the cache when it was compiled before.

    `pod_type` is the slice's type, such as v5p-8. Raises CompileError with an explanation when the step does not compile for that slice,
    StageError for a failure of an unknown kind, and ToolError when the environment cannot be built.
    """
    return _kept(job, Compiled, pod_type, cache, progress)


def compiled_forward(job: ForwardJob, pod_type: str, cache: Path, progress: Callable[[str], None]) -> CompiledForward:
    """The same of a serving step."""
    return _kept(job, CompiledForward, pod_type, cache, progress)


def _kept(job: CompileJob | ForwardJob, result: type[R], pod_type: str, cache: Path, progress: Callable[[str], None]) -> R:
    kept = cache / "plans" / f"{fingerprint([job.MODULE, job.to_json(), source_fingerprint()])}.json"
    with alone(kept.with_suffix(".lock"), wait=True):
        document = _read(kept, result)
        if document is None:
            document = _run(plan_python(cache, progress), job, pod_type, progress)
            write_json(kept, document)
    if "refused" in document:
        raise CompileError(f"the step does not compile for {job.accelerator} {job.topology}: {document['refused']}")
    return result.from_json(document)


def _read(kept: Path, result: type[Compiled] | type[CompiledForward]) -> dict[str, Any] | None:
    """What was found before; None when it is not there, damaged, or of an older version."""
    try:
        document = read_json(kept)
        json.dumps(document, allow_nan=False)
        if not isinstance(document.get("refused"), str):
            result.from_json(document)
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return document


def stop_compilers() -> None:
    """End every compilation of this process, for one that is interrupted while its threads wait for some."""
    for process in list(_running):
        process.kill()


def _run(python: Path, job: CompileJob | ForwardJob, pod_type: str, progress: Callable[[str], None]) -> dict[str, Any]:
    environment = {**os.environ, **compile_environment(pod_type), "PYTHONPATH": str(PACKAGE.parent)}
    with tempfile.TemporaryDirectory() as scratch:
        given, made, log = Path(scratch) / "job.json", Path(scratch) / "result.json", Path(scratch) / "log"
        given.write_text(json.dumps(job.to_json()))
        with log.open("w") as output:
            command = [str(python), "-m", job.MODULE, str(given), str(made)]
            process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=output)
            _running.add(process)
            try:
                _wait(process, progress)
            finally:
                process.kill()
                process.wait()
                _running.discard(process)
        said = log.read_text(errors="replace")
        if process.returncode == 0 and made.exists():
            return read_json(made)
    reason = explain(said)
    if reason is not None and reason.kind == "no-libtpu":
        raise ToolError(str(reason))
    if reason is not None:
        return {"refused": str(reason)}
    what = f"compiling for {job.accelerator} {job.topology}"
    if process.returncode < 0:
        want = ", most likely for want of memory; a 31B takes up to 12 GB" if process.returncode == -signal.SIGKILL else ""
        raise StageError(f"{what} was ended by {signal.Signals(-process.returncode).name}{want}. Run again")
    raise StageError(f"{what} ended with exit code {process.returncode}: {last_words(said.splitlines(), most=1)[:300]}")


def _wait(process: subprocess.Popen[bytes], progress: Callable[[str], None]) -> None:
    started = time.monotonic()
    while True:
        try:
            process.wait(PROGRESS_INTERVAL_S)
            return
        except subprocess.TimeoutExpired:
            progress(f"   compiling, {time.monotonic() - started:.0f} s")


@once
def source_fingerprint() -> str:
    """Changes when the source of the step, or of what reads the compiler's output, does."""
    places = [PACKAGE / name for name in SOURCES]
    files = [file for place in places for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
    return fingerprint({str(file.relative_to(PACKAGE)): file_sha256(file) for file in files})

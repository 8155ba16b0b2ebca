"""A pass over numbered pieces of work on Ray Data; pieces whose result is there are left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from gemma_ray.errors import DataError, GemmaRayError, StageError

PROGRESS_INTERVAL_S = 5.0
TASKS_PER_CPU = 8
"""Ray Data looks for work to hand out a few times a second, so pieces of less than a second go several to a task."""


def in_parallel(
    what: str, job: Callable[[int, Any], None], pieces: Sequence[Any], results: Sequence[Path], progress: Callable[[str], None]
) -> None:
    """Call `job(number, piece)` for every piece whose file in `results` is missing, on the workers of the Ray cluster.

    Raises what the first piece that failed raised; those that are finished stay.
    """
    waiting = [number for number, result in enumerate(results) if not result.exists()]
    if not waiting:
        return
    if len(waiting) < len(results):
        progress(f"   continuing: {len(results) - len(waiting)} of {len(results)} {what}s are there")
    import ray
    from ray.data import DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    tasks = min(len(waiting), TASKS_PER_CPU * max(1, int(ray.cluster_resources().get("CPU", 1))))
    numbers = ray.data.from_items([{"number": number} for number in waiting], override_num_blocks=tasks)
    kept = ray.put(list(pieces))
    said, faults = time.monotonic(), []
    for done, row in enumerate(numbers.map(_Piece(job, kept)).iter_rows(), 1):
        if row["fault"]:
            faults.append((row["number"], row["kind"], row["fault"], row["errno"]))
        if time.monotonic() - said > PROGRESS_INTERVAL_S:
            said = time.monotonic()
            progress(f"   {done} of {len(waiting)} {what}s")
    if faults:
        _, kind, fault, errno = min(faults)
        raise _again(kind, fault, errno)


def start_workers() -> None:
    """Have the cluster start its worker processes and load what a pass needs, while this process does something else."""
    import ray

    @ray.remote(num_cpus=1, max_retries=0)
    def load() -> None:
        import_module("gemma_ray.data.chunks")
        import_module("tokenizers")

    for _ in range(int(ray.available_resources().get("CPU", 0))):
        load.remote()


class _Piece:
    """One piece. What it raises is told rather than raised, so that Ray neither wraps it nor tries again."""

    def __init__(self, job: Callable[[int, Any], None], pieces: Any):
        self.job, self.pieces = job, pieces

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        import ray

        told = {"number": row["number"], "kind": "", "fault": "", "errno": 0}
        try:
            self.job(row["number"], ray.get(self.pieces)[row["number"]])
        except OSError as e:
            return {**told, "kind": "OSError", "fault": f"{e.strerror or e}", "errno": e.errno or 0}
        except GemmaRayError as e:
            return {**told, "kind": type(e).__name__, "fault": str(e)}
        return told


def _again(kind: str, fault: str, errno: int) -> Exception:
    if kind == "OSError":
        return OSError(errno, fault)
    return DataError(fault) if kind == "DataError" else StageError(fault)

"""Plain functions as Ray tasks: work that needs CPUs of the cluster rather than its mesh (exporting a model, grading samples).

A failure comes out as in `run_spmd`: a WorkerError with the function's own message and exit code.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from raycluster.errors import ClusterError, RemoteError

T = TypeVar("T")
R = TypeVar("R")


def run_task(fn: Callable[..., R], *args: Any, num_cpus: float = 1, env: dict[str, str] | None = None) -> R:
    """Run `fn(*args)` in a process of its own on a node with free CPUs, wait, and return what it returned.

    `env` adds environment variables to that process. Ctrl-C ends it.

    Raises WorkerError with the function's message and exit code, and ClusterError when no node has so many CPUs.
    """
    return next(_outcomes(lambda _: fn(*args), [None], num_cpus, env))


def map_tasks(fn: Callable[[T], R], items: Iterable[T], num_cpus: float = 1, env: dict[str, str] | None = None) -> Iterator[R]:
    """Run `fn(item)` for every item in processes across the cluster, and yield the results in the order in which they finish.

    `items` is read as places become free, so it may be long or slow. Closing the iterator, an error or Ctrl-C ends what still runs.

    Raises WorkerError at the first failure, and ClusterError when no node has so many CPUs.
    """
    return _outcomes(fn, items, num_cpus, env)


def _outcomes(fn: Callable[[T], R], items: Iterable[T], num_cpus: float, env: dict[str, str] | None) -> Iterator[R]:
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    largest = max((node["Resources"].get("CPU", 0) for node in nodes), default=0)
    if largest < num_cpus:
        raise ClusterError(f"num_cpus = {num_cpus:g}: the largest node of the Ray cluster has {largest:g} CPUs")
    # Twice what fits at once keeps every CPU busy between two answers.
    window = max(2, int(2 * _cpus(nodes) / max(num_cpus, 0.1)))
    options = {"num_cpus": num_cpus, "max_retries": 1, "runtime_env": {"env_vars": env} if env else None}
    task = ray.remote(_guarded).options(**options)
    program, pending = ray.put(fn), iter(items)
    running = [task.remote(program, item) for item in islice(pending, window)]
    try:
        while running:
            done, running = ray.wait(running, num_returns=1)
            running += [task.remote(program, item) for item in islice(pending, len(done))]
            for reference in done:
                yield _result(reference)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _cpus(nodes: list[dict[str, Any]]) -> float:
    """CPUs of the cluster; nodes that are all on this machine, as emulated hosts are, have no more than it has."""
    total = sum(node["Resources"].get("CPU", 0) for node in nodes)
    here = all(node["NodeManagerHostname"] == socket.gethostname() for node in nodes)
    return min(total, os.cpu_count() or 1) if here else total


def _result(reference: Any) -> Any:
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        answer = ray.get(reference)
    except RayTaskError as e:  # not the function's doing: the function or its result does not pickle
        raise RemoteError.of(e.cause if e.cause is not None else e).to_error() from None
    except RayError as e:
        raise RemoteError.death("its process", str(e)).to_error() from None
    if isinstance(answer, RemoteError):
        raise answer.to_error()
    return answer


def _guarded(fn: Callable[[Any], Any], item: Any) -> Any:
    """In the worker: a failure is an answer like another, so that Ray neither retries nor logs it."""
    try:
        return fn(item)
    except Exception as e:
        return RemoteError.of(e)

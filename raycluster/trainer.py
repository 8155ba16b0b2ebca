"""One JAX program on every host of a slice: gang-scheduled, connected, restarted when a worker dies.

    driver: run_spmd(fn, config, slice)
        -> finds hosts that are free -> Ray Train controller -> one worker process a host -> jax.distributed -> fn(config) in each
        <- what fn returned in process 0, or WorkerError with the worker's own message

Restarts are decided here and not by Ray's FailureConfig, which would also run a program again that has just said what is wrong with its
input. A restarted program begins from the start: it resumes by itself from its own checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raycluster.attempt import Build, Program, jax_trainer, run_attempt
from raycluster.availability import first_free, reserved, wait_for_slice
from raycluster.errors import ClusterError, RemoteError, WorkerError
from raycluster.reports import delivery, send_report
from raycluster.slices import Slice
from raycluster.watch import Limits, Watch, sigterm_handled

__all__ = ["Limits", "run_spmd", "send_report"]

log = logging.getLogger(__name__)

STARVED = (
    "twice at the same point: it was killed, probably for lack of memory. "
    "Lower the batch, the row length or the adapter's rank, or use hosts with more memory"
)
# The chips of a run that has just ended are free again within this time.
SETTLE_S = 5.0


def run_spmd(
    worker_fn: Program,
    config: dict[str, Any] | Callable[[Slice], dict[str, Any]],
    slice: Slice,
    *,
    name: str,
    storage: str | Path,
    max_failures: int = 0,
    on_report: Callable[[dict[str, Any]], None] | None = None,
    on_event: Callable[[str], None] | None = None,
    smaller: Sequence[Slice] = (),
    limits: Limits | None = None,
    build: Build = jax_trainer,
) -> Any:
    """Run `worker_fn(config)` in one JAX process on each host of the slice, and return what process 0's call returned.

    `jax.distributed` is initialised before the call: `jax.process_count()` is `slice.hosts` and `jax.device_count()` is `slice.devices`;
    the processes of a multi-slice are ordered slice by slice. `worker_fn`, `config` and the result must pickle. `storage` is a folder that
    the driver and all hosts see; Ray Train keeps its own records in `storage/name`. `send_report` called by a worker reaches `on_report`
    here, in another thread, while it runs.

    A worker that dies, hangs (`limits`), or raises something that has no `exit_code`, is restarted with all others up to `max_failures`
    times, on whatever slice or spare is free by then; only once when Ray kills it for want of memory, or it dies before its first report,
    for it would do so again. `smaller` are the slices that it may go on with where none like the first is free in time, in order; `config`
    may be a function of the slice used. `on_event` gets a line for each restart and for a SIGTERM (a log message without it). `build` makes
    the Ray trainer: another framework's program is run by giving its own.

    Preemption: on SIGTERM to a worker, to this process, or when Ray drains a host, JAX's `reached_preemption_sync_point` becomes True in
    `worker_fn`, which saves and then raises an exception whose `preempted` is True, once all processes have saved. That is a restart that
    does not count as a failure, provided the attempt had reported; after a SIGTERM to this process, SystemExit(143), at once where the
    attempt has not reported yet.

    Raises ClusterError when the slice is not free, saying what the cluster has; WorkerError with the worker's message and exit code;
    KeyboardInterrupt on Ctrl-C after stopping the workers. Call it in the main thread, connected to a cluster that has the slice
    (`raycluster.session.connect`): Ctrl-C, SIGTERM and the limits need it.
    """
    limits, say, used = limits or Limits(), on_event or log.warning, slice
    failures = _Failures(max_failures, reported=on_report is not None)
    found = wait_for_slice(slice, SETTLE_S, free=True)
    with sigterm_handled() as sigterm, delivery(on_report) as driver:
        while True:
            outlet, watch = driver.next_attempt(), Watch(limits, driver, sigterm, found.hosts or (), on_report is not None, say)
            settings = config(used) if callable(config) else config
            try:
                with sigterm.noted(say), reserved(used, found):
                    trainer = build(worker_fn, settings, used, found, outlet, name, storage)
                    return run_attempt(trainer, used, watch)
            except RemoteError as failure:
                why = failures.count(failure, driver.reports)
            except ClusterError as e:
                why = failures.count_start(e)
            used, found = first_free((slice, *smaller), limits.wait_s)
            where = f" ({', '.join(found.names)})" if found.names else ""
            say(f"{name}: {why}, on {used.describe()}{where}, from its last checkpoint")


@dataclass
class _Failures:
    """Counts what went wrong, and raises it when it is not to be tried again."""

    limit: int
    reported: bool
    failed: int = 0
    starved: int = 0

    def count(self, failure: RemoteError, reports: int) -> str:
        """Why the program is started again, in words. Raises WorkerError when it is not."""
        silent = self.reported and reports == 0
        if failure.preempted and not silent:
            return f"{failure.message or failure.kind}; restarted"
        if failure.deliberate or self.failed == self.limit:
            raise failure.to_error() from None
        self.starved = self.starved + 1 if _starved(failure, silent) else 0
        if self.starved == 2:
            raise WorkerError(f"{failure.to_error()}; {STARVED}", traceback=failure.traceback) from None
        return self._next(str(failure.to_error()))

    def count_start(self, error: ClusterError) -> str:
        """The same for hosts that were gone, or taken, when it came to start on them. Raises `error`."""
        if self.failed == self.limit:
            raise error
        return self._next(str(error))

    def _next(self, what: str) -> str:
        self.failed += 1
        return f"{what}; restart {self.failed} of {self.limit}"


def _starved(failure: RemoteError, silent: bool) -> bool:
    """Whether a death looks like one for want of memory: Ray says so, or it came before a report and the node lives on (no preemption)."""
    return failure.died and "its node has died" not in failure.traceback and (silent or "low on memory" in failure.traceback)

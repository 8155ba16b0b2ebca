"""Progress from the workers to the driver while they run, and one word back: stop.

    worker: send_report(dict)  ->  mailbox (a Ray actor beside the driver)  ->  driver thread  ->  on_report(dict)
    process 0: stop_asked()?   <-  mailbox                                  <-  Delivery.ask_to_stop()

A worker never waits: it hands the dictionary to Ray and goes on. Before its function returns it waits once, for the last report to have
arrived, so none is lost. The driver's thread asks for new ones a few times a second. Those of one worker stay in order.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

POLL_S = 0.2
FLUSH_S = 10.0
STARTED: dict[str, Any] = {"started": None}
"""What process 0 sends before it calls its function."""
NOTE = "note"
"""Key of a report that is no progress."""


class _Mailbox:
    """The actor. It does one call at a time: only such an actor takes a caller's calls in order, Ray's asynchronous ones do not."""

    def __init__(self) -> None:
        self._reports: list[dict[str, Any]] = []
        self._stopped = -1

    def put(self, report: dict[str, Any]) -> None:
        self._reports.append(report)

    def take(self) -> list[dict[str, Any]]:
        reports, self._reports = self._reports, []
        return reports

    def stop(self, attempt: int) -> None:
        self._stopped = attempt

    def is_stopped(self, attempt: int) -> bool:
        return self._stopped == attempt


class Outlet:
    """The worker's end; it travels to the workers of one attempt inside the training configuration."""

    def __init__(self, mailbox: Any, attempt: int = 0) -> None:
        self._mailbox = mailbox
        self._attempt = attempt
        self._last: Any = None

    def send(self, report: dict[str, Any]) -> None:
        self._last = self._mailbox.put.remote(report)

    def stop_asked(self) -> bool:
        """Whether the driver wants this attempt to save and end. Raises RayError when the driver has gone."""
        return ray.get(self._mailbox.is_stopped.remote(self._attempt))

    def flush(self) -> None:
        """Wait until the last report has arrived; a mailbox that is gone is the driver's end, not the worker's failure."""
        if self._last is not None:
            with contextlib.suppress(RayError):
                ray.get(self._last, timeout=FLUSH_S)


_outlet: Outlet | None = None


def set_outlet(outlet: Outlet | None) -> None:
    """Choose where this process's reports go; None drops them."""
    global _outlet
    _outlet = outlet


def send_report(report: dict[str, Any]) -> None:
    """Send progress to the driver's `on_report` without waiting. Call it in a function that `run_spmd` runs; elsewhere it does nothing.

    The values must pickle and should be small: step, loss, tokens a second, as Python numbers. One with the key `note` is for people and
    does not count as progress: a program that dies after it alone has died before its first report.
    """
    if _outlet is not None:
        _outlet.send(report)


class Delivery:
    """The driver's end: an outlet for each attempt, and what has come of it."""

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox
        self.attempt = 0
        self.started = False
        self.reports = 0
        self.begun_s = self.last_s = time.monotonic()

    def next_attempt(self) -> Outlet:
        """Count from zero again; returns the outlet to give to the workers."""
        self.attempt += 1
        self.started, self.reports, self.begun_s = False, 0, time.monotonic()
        self.last_s = self.begun_s
        return Outlet(self._mailbox, self.attempt)

    def ask_to_stop(self) -> None:
        """Tell the workers of this attempt to save and end."""
        self._mailbox.stop.remote(self.attempt)

    def count(self, report: dict[str, Any]) -> bool:
        """Note that something came; returns whether it is a report of the program, and not the sign that it has started."""
        self.started, self.last_s = True, time.monotonic()
        self.reports += report != STARTED and NOTE not in report
        return report != STARTED


@contextlib.contextmanager
def delivery(on_report: Callable[[dict[str, Any]], None] | None) -> Iterator[Delivery]:
    """Deliver reports to `on_report`, in a thread of its own, for the block.

    The block's end delivers what is still on the way. An exception of `on_report` stops the delivery and is raised at the end of a block
    that did not fail otherwise.
    """
    here = ray.get_runtime_context().get_node_id()
    placement = NodeAffinitySchedulingStrategy(here, soft=False)
    mailbox: Any = ray.remote(_Mailbox).options(num_cpus=0, scheduling_strategy=placement).remote()
    stop, failures, driver = threading.Event(), list[BaseException](), Delivery(mailbox)

    def deliver() -> None:
        try:
            over = False
            while not over:
                over = stop.wait(POLL_S)  # what arrived before the end is taken once more after it
                for report in ray.get(mailbox.take.remote()):
                    if driver.count(report) and on_report is not None:
                        on_report(report)
        except RayError:  # the cluster went away under us: the run's own error says so
            return
        except Exception as e:
            failures.append(e)

    thread = threading.Thread(target=deliver, name="reports", daemon=True)
    thread.start()
    try:
        yield driver
    finally:
        stop.set()
        thread.join(timeout=FLUSH_S)
        with contextlib.suppress(RayError):
            ray.kill(mailbox)
    if failures:
        raise failures[0]

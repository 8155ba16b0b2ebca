"""What the driver watches while an attempt runs: workers that hang, hosts that are to go, and a SIGTERM of its own.

no sign of life for start_s or stall_s  ->  the workers are aborted, as by Ctrl-C
a host is drained, or SIGTERM           ->  the workers are asked to save and end, and aborted after save_s
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from raycluster.availability import draining_nodes
from raycluster.errors import RemoteError
from raycluster.reports import Delivery

POLL_S = 0.5
DRAIN_POLL_S = 2.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """How long `run_spmd` waits for what; None is for ever.

    `wait_s`: at a restart, for a slice or a spare to be free. `start_s`: from the start of an attempt to its first report (where nobody
    takes reports, to the call of the function), with the first compilation. `stall_s`: from one report to the next. `save_s`: for workers
    that were asked to save and end.
    """

    wait_s: float = 60.0
    start_s: float | None = 3600.0
    stall_s: float | None = None
    save_s: float = 120.0


class Sigterm:
    """SIGTERM to the driver: noted while an attempt runs, so that the workers can save; a second one, or one at another time, ends it."""

    def __init__(self) -> None:
        self.asked = False
        self._running = False

    def handle(self, number: int, frame: object) -> None:
        if self.asked or not self._running:
            raise SystemExit(128 + number)
        self.asked = True

    @contextlib.contextmanager
    def noted(self, say: Callable[[str], None]) -> Iterator[None]:
        """Note the signal for the block; at its end, however it ends, `say` what came of it and raise SystemExit(143)."""
        self._running = True
        try:
            yield
        except Exception as e:
            if not self.asked:
                raise
            say(str(e.message if isinstance(e, RemoteError) else e))
        finally:
            self._running = False
        if self.asked:
            raise SystemExit(128 + signal.SIGTERM)


@contextlib.contextmanager
def sigterm_handled() -> Iterator[Sigterm]:
    """Handle SIGTERM for the block. Outside the main thread, where Python allows no handler, it is left as it is."""
    handler = Sigterm()
    if threading.current_thread() is not threading.main_thread():
        yield handler
        return
    before = signal.signal(signal.SIGTERM, handler.handle)
    try:
        yield handler
    finally:
        signal.signal(signal.SIGTERM, before)


class Watch:
    """Watches one attempt in a thread of its own, from `over` until the end of that block."""

    def __init__(
        self, limits: Limits, driver: Delivery, sigterm: Sigterm, hosts: tuple[str, ...], reported: bool, say: Callable[[str], None]
    ) -> None:
        self._limits, self._driver, self._sigterm, self._hosts = limits, driver, sigterm, frozenset(hosts)
        self._reported, self._say = reported, say
        self._asked_s: float | None = None
        self._notice = ""
        self._aborted: str | None = None
        self._drain_looked_s = time.monotonic()

    @contextlib.contextmanager
    def over(self, abort: Callable[[], None]) -> Iterator[None]:
        """Call `abort` when a limit is passed. What fails in the block comes out as what it was: a limit, a preemption, or as it is."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(POLL_S):
                if reason := self._passed():
                    self._aborted = reason
                    abort()
                    return

        thread = threading.Thread(target=watch, name="watch", daemon=True)
        thread.start()
        try:
            yield
        except RemoteError as failure:
            raise self._explained(failure) from None
        finally:
            done.set()
            thread.join()

    def _explained(self, failure: RemoteError) -> RemoteError:
        preempted = self._asked_s is not None
        if self._aborted is not None:
            return RemoteError("TimeoutError", self._aborted, None, failure.traceback, preempted)
        if preempted and failure.died:  # it was to go, and has gone
            return RemoteError("", self._notice, None, failure.traceback, preempted)
        return failure

    def _passed(self) -> str | None:
        """Which limit has passed, in words."""
        now, limits, driver = time.monotonic(), self._limits, self._driver
        if self._asked_s is None and (notice := self._wish_to_stop(now)):
            self._asked_s, self._notice = now, notice
            if self._sigterm.asked and self._reported and not driver.reports:
                return f"{notice} before the first report: nothing is lost"  # there is nothing to save yet, and it may be minutes away
            if self._sigterm.asked:
                self._say(f"{notice}: the workers save and end, within {limits.save_s:g} s; a second one ends them at once")
            driver.ask_to_stop()
        if self._asked_s is not None:
            late = self._late(self._asked_s, limits.save_s)
            return f"{self._notice}, and the workers did not save and end in {limits.save_s:g} s" if late else None
        if driver.reports if self._reported else driver.started:
            silent = self._reported and self._late(driver.last_s, limits.stall_s)
            return f"no report for {limits.stall_s:g} s: hung?" if silent else None
        what = "report" if self._reported else "sign of a worker"
        return f"no {what} in {limits.start_s:g} s from the start: hung?" if self._late(driver.begun_s, limits.start_s) else None

    @staticmethod
    def _late(since_s: float, limit_s: float | None) -> bool:
        return limit_s is not None and time.monotonic() - since_s > limit_s

    def _wish_to_stop(self, now: float) -> str | None:
        if self._sigterm.asked:
            return "SIGTERM came"
        if now - self._drain_looked_s < DRAIN_POLL_S or not self._hosts:
            return None
        self._drain_looked_s = now
        try:
            return "a host is being drained" if self._hosts & draining_nodes() else None
        except Exception as e:  # the GCS does not answer for a moment: it is asked again
            log.debug("draining nodes: %s", e)
            return None

"""What Ray runs in each worker process: the program, a way for its reports, and the driver's wish that it stop.

A worker is told to stop by SIGTERM, from whoever takes its machine away, and JAX's preemption service does the rest: the notice goes round
all processes, and `jax.experimental.multihost_utils.reached_preemption_sync_point(step)` is True in every one of them at the same later
step, where the program saves and raises an exception whose `preempted` is True. `jax.distributed.initialize` has by then put its handler
in place of Ray's, which would end the process at once. The driver asks process 0, which signals itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from raycluster.errors import RemoteError
from raycluster.reports import STARTED, Outlet, set_outlet

POLL_S = 0.5


def run_program(call: dict[str, Any]) -> Any:
    """Run `call["program"](call["config"])`, and let what it raises out as a RemoteError."""
    outlet: Outlet = call["outlet"]
    set_outlet(outlet)
    if call["one_emulated_host"]:
        _collectives_in_process()
    try:
        with _stopped_by(outlet):
            return call["program"](call["config"])
    except (Exception, SystemExit) as e:
        raise RemoteError.of(e) from None
    finally:
        outlet.flush()


@contextlib.contextmanager
def _stopped_by(outlet: Outlet) -> Iterator[None]:
    """In process 0, for the block: pass the driver's wish to stop on to JAX, as the signal that it waits for."""
    from ray.exceptions import RayError
    from ray.train import get_context

    if get_context().get_world_rank() != 0:
        yield
        return
    outlet.send(STARTED)
    over = threading.Event()

    def watch() -> None:
        with contextlib.suppress(RayError):  # the driver has gone, and this process goes with it
            while not over.wait(POLL_S):
                if outlet.stop_asked():
                    os.kill(os.getpid(), signal.SIGTERM)
                    return

    threading.Thread(target=watch, name="stop", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _collectives_in_process() -> None:
    """Let the CPU devices of a lone process exchange data in memory: over gloo a tiny step took 0.86 s, so 0.31 s.

    Ray has initialised jax.distributed by now, but JAX creates its devices later, at the first use.
    """
    import jax

    jax.config.update("jax_cpu_collectives_implementation", None)

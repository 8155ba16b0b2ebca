"""Ray's daemons in process groups of their own, so that a signal to a program's group reaches the program alone.

Ray starts the GCS and the raylets in the group of the program that starts them, and they end at SIGTERM at once: `timeout`, a container's
stop or `kill -TERM -- -PID` would take the cluster from under workers that are about to save. They block SIGINT for the same reason.
A parameter would do, where Ray has none: `start_ray_process` in ray/_private/services.py (Ray 2.60).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def daemons_in_own_groups() -> Iterator[None]:
    """Give every daemon that Ray starts in the block a process group of its own, whose members its workers are."""
    services: Any = importlib.import_module("ray._private.services")
    original = services.ConsolePopen
    services.ConsolePopen = functools.partial(original, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = original

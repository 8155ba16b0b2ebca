"""What Ray says on the driver's terminal: warnings and errors, on stderr."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

QUIET_LOGGERS = ("ray", "ray.train", "ray.data", "ray.serve")


@contextlib.contextmanager
def quiet_ray() -> Iterator[None]:
    """For the block, keep Ray's informational lines away, and send what it forwards from workers to stderr.

    Ray prints workers' output and its own notices on stdout, where a program's result belongs. A raylet's notice, such as that a
    worker died, goes to the debug log: the error that the driver gets says so in one line.
    """
    loggers = [logging.getLogger(name) for name in QUIET_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    with _forwarded_to_stderr():
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextlib.contextmanager
def _forwarded_to_stderr() -> Iterator[None]:
    # Ray 2.60 has no setting for the stream; where this function is gone, its messages go where Ray likes.
    import ray._private.worker as ray_worker

    original = getattr(ray_worker, "print_to_stdstream", None)
    if original is None:
        yield
        return

    def forward(data: dict[str, Any], *arguments: Any, **keywords: Any) -> None:
        if data.get("pid") == "raylet":
            logging.getLogger(__name__).debug("%s", data)
        else:
            original({**data, "is_err": True}, *arguments, **keywords)

    ray_worker.print_to_stdstream = forward
    try:
        yield
    finally:
        ray_worker.print_to_stdstream = original

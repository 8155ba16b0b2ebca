"""How a replica's failed start is told to the process that waits for it: one marked line, found again in Serve's status message."""

from __future__ import annotations

import re
from pathlib import Path

FAILED_START = "gemma-ray: engine did not start: "
"""Begins the line; ` (log: PATH)` ends it."""

_EXCEPTION = re.compile(r"\b([A-Z]\w*(?:Error|Exception): .+(?:\n[ \t]+\S.*){0,3})")
"""An exception's line with what it goes on to say on indented lines, as pydantic does; tracebacks end with the unindented line."""

_LONGEST = 600
_SECOND_HAND = ("Engine core initialization failed", FAILED_START)


def failure_cause(error: BaseException, logs: list[Path]) -> tuple[str, str]:
    """One line saying why an engine did not start, and the log that says more.

    `logs` are the replica's stdout and stderr, in this order. An engine that fails in a process of its own raises only "see root cause
    above" here: the cause is then the last exception that vLLM logged. Otherwise it is the error itself, whose traceback is in stderr.
    """
    known = [path for path in logs if path.is_file()]
    message = one_line(str(error)) or type(error).__name__
    if message.startswith(_SECOND_HAND):
        for path in known:
            if cause := last_exception(path):
                return cause, str(path)
    return message, str(known[-1]) if known else "not kept"


def last_exception(log: Path) -> str | None:
    """The last `SomeError: message` of a log that is a cause of its own, on one line, or None."""
    if not log.is_file():
        return None
    found = (one_line(match[1]) for match in _EXCEPTION.finditer(log.read_text(encoding="utf-8", errors="replace")))
    causes = [text for text in found if not text.split(": ", 1)[1].startswith(_SECOND_HAND)]
    return causes[-1] if causes else None


def one_line(message: str) -> str:
    """A message on one line of at most 600 characters, without the input that pydantic repeats."""
    return re.sub(r" \[type=.*", "", " ".join(message.split()))[:_LONGEST]

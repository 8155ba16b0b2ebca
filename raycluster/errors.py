"""The errors that raycluster raises on purpose, and how a failure inside a worker process becomes one of them.

Ray wraps what a worker raised in several layers of its own, with a traceback for each. Here the worker turns its exception into a
`RemoteError` (plain strings and a number, so it always pickles), and the driver turns that into a `WorkerError` whose message is the
worker's own. An exception with an `exit_code` attribute was raised on purpose: it keeps that code, and nothing is retried. One whose
attribute `preempted` is True says that the work was saved because its machine, or the driver, is to go: it goes on elsewhere.
"""

from __future__ import annotations

import errno
import traceback

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the system's errors that say that a disk takes no more."""
UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""Those, where a file is named, that trying again does not mend: a folder in its place, no permission."""


def fault_of_a_place(error: BaseException, *also: int) -> str | None:
    """What the system says of a disk that is full, or of a file that only whoever owns the place can mend; None for another error.

    `also` are further numbers of errors that name a file.
    """
    if not isinstance(error, OSError):
        return None
    if error.filename is None:
        return error.strerror if error.errno in FULL else None
    return f"{error.filename}: {error.strerror}" if error.errno in (*FULL, *UNUSABLE, *also) else None


class ClusterError(Exception):
    """What was asked for does not exist, or the cluster does not have it."""

    exit_code = 2


class WorkerError(Exception):
    """A worker process failed.

    `exit_code` is the one of the exception that the worker raised, or 1 when it had none. `traceback` is the worker's, for a debug flag.
    """

    def __init__(self, message: str, exit_code: int = 1, traceback: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.traceback = traceback


class RemoteError(Exception):
    """What a worker raised, in a form that crosses processes whatever the original was made of."""

    def __init__(self, kind: str, message: str, exit_code: int | None, traceback: str, preempted: bool = False) -> None:
        super().__init__(kind, message, exit_code, traceback, preempted)
        self.kind = kind
        self.message = message
        self.exit_code = exit_code
        self.traceback = traceback
        self.preempted = preempted

    @classmethod
    def of(cls, error: BaseException) -> RemoteError:
        """Describe an exception; call it in the worker. A full disk or a file of another kind is the caller's to mend: exit code 2."""
        fault, preempted = fault_of_a_place(error), getattr(error, "preempted", False) is True
        code = 2 if fault else getattr(error, "exit_code", None)
        return cls(type(error).__name__, fault or str(error), code if isinstance(code, int) else None, traceback.format_exc(), preempted)

    @property
    def deliberate(self) -> bool:
        """Whether the worker raised it on purpose, so that trying again cannot help."""
        return self.exit_code is not None and not self.preempted

    @property
    def died(self) -> bool:
        """Whether the process ended without raising anything."""
        return not self.kind

    def to_error(self) -> WorkerError:
        """The error to raise in the driver. A deliberate message stands alone; for any other the exception's name leads its first line."""
        if self.exit_code is not None:
            return WorkerError(self.message, self.exit_code, self.traceback)
        first_line = self.message.strip().partition("\n")[0]
        return WorkerError(": ".join(part for part in ("a worker failed", self.kind, first_line) if part), 1, self.traceback)

    @classmethod
    def death(cls, who: str, detail: str) -> RemoteError:
        """A process that ended without saying why."""
        return cls("", f"{who} ended without an answer (killed, out of memory, or crashed in native code)", None, detail)

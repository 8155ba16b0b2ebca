"""Run a program that nobody trusts, with a bound on everything that it can use.

                 bubblewrap (when it works here)                             plain
    files        the root read-only, /tmp empty, one folder writable         whatever the user may write
    network      none                                                        the user's
    processes    a namespace of their own, which dies with this process      a process group of their own, killed at the end
    both         processor seconds, address space, size of a file (ulimit); wall-clock seconds and bytes printed (watched from here)

`sandbox_kind` probes once whether bubblewrap works: containers often forbid the namespaces it needs. Callers report which kind ran. The
limits are set by a shell in front of the program rather than between fork and exec, where Python must not run in a process with threads.
"""

from __future__ import annotations

import functools
import json
import math
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SandboxKind = Literal["bubblewrap", "none"]

# The soft processor limit comes first and ends the program with SIGXCPU, which tells a timeout from a kill for another reason.
_ULIMIT = 'ulimit -c 0; ulimit -S -t "$1"; ulimit -H -t "$2"; ulimit -f "$3"; ulimit -v "$4"; shift 4; exec "$@"'
_XCPU_CODES = (-signal.SIGXCPU, 128 + signal.SIGXCPU)
_FILE_BLOCK_BYTES = 512  # POSIX: the unit of `ulimit -f`


class SandboxError(Exception):
    """The sandbox itself failed; the program never ran, or nobody knows how it ended."""


@dataclass(frozen=True)
class Limits:
    """What one run may use. Processor time, not wall-clock, is the measure of a timeout: a busy machine must not change a verdict."""

    cpu_s: float = 30.0
    memory_bytes: int = 2 << 30
    file_bytes: int = 256 << 20
    output_bytes: int = 16 << 20

    @property
    def wall_s(self) -> float:
        """The bound for a program that waits instead of computing, or a machine shared by several."""
        return 4 * self.cpu_s + 10


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    `output` is stdout and stderr in order, `exit_code` is 128 + signal when one killed it, `stopped` the limit that it passed.
    """

    output: str
    exit_code: int
    stopped: Literal["time", "output"] | None = None


@functools.cache
def sandbox_kind() -> SandboxKind:
    """The strongest sandbox that works on this machine, found by trying it."""
    with tempfile.TemporaryDirectory(prefix="gemma-ray-probe-") as folder:
        try:
            outcome = run_limited(["sh", "-c", "echo works > probe && cat probe"], Path(folder), Limits(cpu_s=5), kind="bubblewrap")
        except SandboxError:
            return "none"
    return "bubblewrap" if outcome.output == "works\n" else "none"


def run_limited(
    command: Sequence[str], folder: Path, limits: Limits, *, readable: Sequence[Path] = (), kind: SandboxKind | None = None
) -> Outcome:
    """Run `command` in `folder`, under bubblewrap the only place that it can write to; `readable` are folders under /tmp that it needs.

    Raises SandboxError when the sandbox cannot be set up or the program cannot be started.
    """
    kind = kind or sandbox_kind()
    folder = folder.resolve()
    cpu_s = max(1, math.ceil(limits.cpu_s))
    sizes = [str(cpu_s), str(cpu_s + 1), str(limits.file_bytes // _FILE_BLOCK_BYTES), str(limits.memory_bytes // 1024)]
    limited = ["/bin/sh", "-c", _ULIMIT, "sh", *sizes, *command]
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "HOME": str(folder)}
    if kind == "none":
        return _watch(limited, folder, {**environment, "TMPDIR": str(folder)}, limits)
    status_read, status_write = os.pipe()
    with os.fdopen(status_read, "rb") as status:
        try:
            command = [*_bubblewrap(folder, readable, status_write), *limited]
            outcome = _watch(command, folder, environment, limits, keep=(status_write,))
        finally:
            os.close(status_write)
        _check_started(status.read(), outcome)
    return outcome


def _bubblewrap(folder: Path, readable: Sequence[Path], status_fd: int) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("bubblewrap (bwrap) is not installed")
    binds = [part for path in readable for part in ("--ro-bind", str(path.resolve()), str(path.resolve()))]
    isolation = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--json-status-fd", str(status_fd)]
    root = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    return [program, *isolation, *root, *binds, "--bind", str(folder), str(folder), "--chdir", str(folder), "--"]


def _check_started(status: bytes, outcome: Outcome) -> None:
    """bubblewrap reports the program's exit code on the status pipe, and nothing when it failed before starting it."""
    if outcome.stopped is None and not any("exit-code" in json.loads(line) for line in status.splitlines()):
        raise SandboxError(f"bubblewrap did not start the program: {outcome.output.strip()[:300]}")


def _watch(command: Sequence[str], folder: Path, environment: dict[str, str], limits: Limits, keep: tuple[int, ...] = ()) -> Outcome:
    """Start, read until the output ends or a limit is passed, and leave no process of the group behind."""
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=keep,
            start_new_session=True,
        )
    except OSError as e:
        raise SandboxError(f"cannot start {command[0]}: {e}") from e
    try:
        output, stopped = _read(process, limits)
    finally:
        _kill_group(process)
    if process.returncode in _XCPU_CODES:
        stopped = "time"
    code = process.returncode
    return Outcome(output.decode("utf-8", errors="replace"), 128 - code if code < 0 else code, stopped)


def _read(process: subprocess.Popen[bytes], limits: Limits) -> tuple[bytes, Literal["time", "output"] | None]:
    deadline = time.monotonic() + limits.wall_s
    output = bytearray()
    assert process.stdout is not None
    with process.stdout as stream, selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while (left_s := deadline - time.monotonic()) > 0:
            if not selector.select(left_s):
                break
            block = os.read(stream.fileno(), 1 << 16)
            if not block:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    break
                return bytes(output), None
            output += block
            if len(output) > limits.output_bytes:
                return bytes(output[: limits.output_bytes]), "output"
    return bytes(output), "time"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:
        process.kill()
    process.wait()

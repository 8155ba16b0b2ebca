"""An endpoint that outlives the command that started it, and one that lives until Ctrl-C.

A Serve application on a standing Ray cluster outlives its driver by itself. One on a local or emulated cluster dies with the process that
hosts the cluster, so that process is started detached:

    parent: start_detached ── Popen(argv, own session) ──► child: serve_models, announce(state file), run_until_signal
        └─ waits for the state file, or for the child's end ◄──┘
    later: stop(state file) ── SIGTERM ──► child: stops the endpoint and its cluster, exits

The state file says who serves and where. It names the process by pid and start time, so that a file left by a crash is never taken for a
server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from gemma_ray.artifacts import RunPaths, alone, read_json, write_json
from gemma_ray.errors import InputError, ResourceError, StageError
from gemma_ray.serving.application import Endpoint

STOP_GRACE_S = 60.0
"""How long `stop` waits for a clean end before it kills the process and its children."""

FAILED_START_GRACE_S = 15.0
"""The same for a server that did not become ready."""

_CHILDREN_GRACE_S = 5.0
_POLL_S = 0.1


@dataclass(frozen=True)
class Background:
    """A detached server as its state file tells it: who (`pid`, born at `started_s` since the epoch), where (`url`, `models`), and its
    log.
    """

    pid: int
    started_s: float
    url: str
    models: tuple[str, ...]
    log: str

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.url, self.models)


def start_detached(argv: Sequence[str], state_file: Path, log_file: Path, ready_timeout_s: float) -> Background:
    """Run `argv` in a session of its own and return once it has called `announce(state_file, ...)`; its output goes to `log_file`.

    Raises ResourceError when a server already runs or starts from `state_file`; InputError with the child's own message when it ends with
    exit code 2; StageError with its last words when it ends otherwise, or is not ready after `ready_timeout_s` (it is then killed).
    """
    with _starting(state_file):
        refuse_second(state_file)
        state_file.unlink(missing_ok=True)
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("w", encoding="utf-8") as output:
            child = subprocess.Popen(list(argv), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return _wait_for_announcement(child, state_file, log_file, time.monotonic() + ready_timeout_s, ready_timeout_s)
        except BaseException:
            _end(child.pid, FAILED_START_GRACE_S)
            raise


def announce(state_file: Path, endpoint: Endpoint, log_file: Path) -> None:
    """Tell whoever waits at `state_file` that this process serves `endpoint`. Raises ResourceError when another's server has taken it."""
    refuse_second(state_file)
    state = Background(os.getpid(), _born(os.getpid()), endpoint.url, endpoint.models, str(log_file))
    write_json(state_file, asdict(state))


def withdraw(state_file: Path, pid: int | None = None) -> None:
    """Remove the state file of process `pid`, None = this one; another's stays."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if read_json(state_file)["pid"] == (os.getpid() if pid is None else pid):
            state_file.unlink(missing_ok=True)


def refuse_second(state_file: Path) -> None:
    """Raise ResourceError when another process serves from `state_file`: it would go on with nothing that names it."""
    found = running(state_file)
    if found is not None and found.pid != os.getpid():
        recipe = RunPaths(state_file.parent).recipe
        raise ResourceError(f"this run is served already, at {found.url} (pid {found.pid}); `gemma-ray serve {recipe} --stop` ends it")


def run_until_signal(stop_server: Callable[[], None], state_file: Path | None = None) -> None:
    """Block until SIGINT (Ctrl-C) or SIGTERM, then call `stop_server` and remove the state file; call it from the main thread.

    A second signal, while the server stops, ends the process in the usual way.
    """
    stopped = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stopped.set()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not stopped.wait(1.0):  # a wait without a timeout would not let signals through on every platform
            pass
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        try:
            stop_server()
        finally:
            if state_file is not None:
                withdraw(state_file)


def running(state_file: Path) -> Background | None:
    """The server that `state_file` names, or None when there is none or it has died; a stale or damaged file is removed."""
    try:
        raw: dict[str, Any] = read_json(state_file)
        state = Background(int(raw["pid"]), float(raw["started_s"]), str(raw["url"]), tuple(raw["models"]), str(raw["log"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        state = None
    if state is not None and _is_alive(state.pid, state.started_s):
        return state
    state_file.unlink(missing_ok=True)
    return None


def stop(state_file: Path, grace_s: float = STOP_GRACE_S) -> Background | None:
    """End the server that `state_file` names and return what it was, or None when none runs. After `grace_s` it is killed with all its
    children.
    """
    state = running(state_file)
    if state is None:
        return None
    _end(state.pid, grace_s)
    withdraw(state_file, state.pid)
    return state


@contextlib.contextmanager
def _starting(state_file: Path) -> Iterator[None]:
    """Hold the right to start from `state_file`; the kernel gives it back when this process ends, however it ends."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(alone(state_file.with_name(f".{state_file.name}.lock")))
        except BlockingIOError as e:
            raise ResourceError(f"another process is starting a server from {state_file}; wait for it") from e
        yield


def _wait_for_announcement(
    child: subprocess.Popen[bytes], state_file: Path, log_file: Path, deadline: float, timeout_s: float
) -> Background:
    while child.poll() is None:
        if (state := running(state_file)) is not None:
            return state
        if time.monotonic() > deadline:
            raise StageError(f"the server was not ready after {timeout_s:.0f} s (serve.ready_timeout_s); its log: {log_file}")
        time.sleep(_POLL_S)
    words = f"{_last_words(log_file)} (log: {log_file})"
    if child.returncode == InputError.exit_code:
        raise InputError(words)
    raise StageError(f"the server ended with exit code {child.returncode}: {words}")


def _last_words(log_file: Path) -> str:
    """The error that the command reported, else its last line."""
    lines = [line.strip() for line in log_file.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it wrote nothing"])[-1]


def _born(pid: int) -> float:
    import psutil

    return psutil.Process(pid).create_time()


def _is_alive(pid: int, started_s: float) -> bool:
    import psutil

    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - started_s) < 1.0
    except psutil.NoSuchProcess:
        return False


def _end(pid: int, grace_s: float) -> None:
    """SIGTERM to a process; after it has ended, or after `grace_s`, SIGKILL to what is left of it and its descendants."""
    import psutil

    try:
        process = psutil.Process(pid)
        tree = [process, *process.children(recursive=True)]
        process.terminate()
    except psutil.NoSuchProcess:
        return
    ended, _ = psutil.wait_procs([process], timeout=grace_s)
    _, left = psutil.wait_procs(tree, timeout=_CHILDREN_GRACE_S if ended else 0)
    for survivor in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            survivor.kill()
    psutil.wait_procs(left, timeout=_CHILDREN_GRACE_S)

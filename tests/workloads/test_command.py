"""What a command lets through to the terminal, and the exit codes it turns errors into."""

import errno
import io
import logging
import subprocess
import sys

import pytest

from gemma_ray.errors import InputError
from workloads.command import reported


@pytest.fixture
def terminal():
    """A library that installs its own handler on the root logger, as ray.llm does when it is imported."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    yield stream
    logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize(("debug", "seen"), [(False, "broken\n"), (True, "routine\nbroken\n")])
def test_only_errors_of_libraries_reach_the_terminal_unless_debugging(debug: bool, seen: str, terminal: io.StringIO):
    with reported(debug):
        logging.getLogger("some.library").warning("routine")
        logging.getLogger("some.library").error("broken")
    assert terminal.getvalue() == seen


def test_logging_is_as_before_after_a_command(terminal: io.StringIO):
    with pytest.raises(SystemExit), reported(False):
        raise InputError("no such file")
    logging.getLogger("some.library").warning("routine")
    assert terminal.getvalue() == "routine\n"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InputError("no file 'x.yaml'"), 2, "error: no file 'x.yaml'\n"),
        (KeyboardInterrupt(), 130, "interrupted; the same command continues from what is finished\n"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/there/plan.json"),
            2,
            "error: /there/plan.json: Permission denied; run.dir and run.cache_dir say where files go, `df -h` what is free there\n",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            2,
            "error: No space left on device; run.dir and run.cache_dir say where files go, `df -h` what is free there\n",
        ),
        (
            PermissionError(errno.EPERM, "Operation not permitted"),
            1,
            "error: unexpected PermissionError: [Errno 1] Operation not permitted\nRun again with --debug for the traceback\n",
        ),
        (ZeroDivisionError("a\nb"), 1, "error: unexpected ZeroDivisionError: a\nRun again with --debug for the traceback\n"),
    ],
)
def test_errors_become_one_message_and_an_exit_code(error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped, reported(False):
        raise error
    assert stopped.value.code == code
    assert capsys.readouterr().err == message


def test_debug_lets_the_traceback_through():
    with pytest.raises(ZeroDivisionError), reported(True):
        raise ZeroDivisionError


SIGTERM = """
import os, signal
from workloads.command import reported
if {handled}:
    signal.signal(signal.SIGTERM, lambda *_: print("heard"))
with reported(False):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        print("cleaned")
"""


@pytest.mark.parametrize(("handled", "code", "said"), [(False, 143, "cleaned\n"), (True, 0, "heard\ncleaned\n")])
def test_sigterm_unwinds_the_stack_unless_the_program_handles_it(handled: bool, code: int, said: str):
    found = subprocess.run([sys.executable, "-c", SIGTERM.format(handled=handled)], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (code, said)

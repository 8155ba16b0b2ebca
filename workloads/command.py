"""`python -m workloads.<stage> RECIPE [--set section.key=value ...]`, the form in which a stage is submitted as a Ray job."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from gemma_ray.recipe import Recipe, load_recipe
from raycluster.errors import fault_of_a_place
from workloads.progress import Progress

Run = Callable[[Recipe, Progress], Any]


def main(run: Run) -> None:
    """Read the recipe from the command line and run a stage.

    Exit codes are those of `gemma-ray`: 1 the work failed, 2 the input was wrong.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("recipe", help="YAML file, or the name of a shipped recipe")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", dest="overrides", help="override a key")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    arguments = parser.parse_args()
    with reported(arguments.debug):
        run(load_recipe(arguments.recipe, arguments.overrides), Progress())


class reported:  # noqa: N801 - reads as a word in `with reported(debug):`
    """Turn an exception into one short message on stderr and an exit code; a traceback only with `debug`.

    SIGTERM becomes SystemExit(143) unless the program handles it, so that temporary files go and what a stage started ends with it.
    """

    def __init__(self, debug: bool):
        self.debug = debug

    def __enter__(self) -> None:
        if not self.debug:
            quiet_libraries()
        self.handles_sigterm = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if self.handles_sigterm:
            signal.signal(signal.SIGTERM, _exit_on_signal)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        logging.disable(logging.NOTSET)
        if self.handles_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if error is None or isinstance(error, SystemExit) or self.debug:
            return
        if isinstance(error, KeyboardInterrupt):
            sys.stderr.write("interrupted; the same command continues from what is finished\n")
            raise SystemExit(130) from None
        code = getattr(error, "exit_code", None)
        if isinstance(code, int):
            sys.stderr.write(f"error: {error}\n")
            raise SystemExit(code) from None
        if fault := fault_of_a_place(error, errno.EEXIST):
            sys.stderr.write(f"error: {fault}; run.dir and run.cache_dir say where files go, `df -h` what is free there\n")
            raise SystemExit(2) from None
        first = (str(error).strip() or "no message").splitlines()[0]
        sys.stderr.write(f"error: unexpected {type(error).__name__}: {first}\nRun again with --debug for the traceback\n")
        raise SystemExit(1) from None


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def quiet_libraries() -> None:
    """Keep routine messages of libraries off the terminal, whatever handlers they install; their errors still come through."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.disable(logging.WARNING)

"""The one line that says why an engine did not start, from what vLLM and Serve leave behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemma_ray.serving.failures import FAILED_START, failure_cause, last_exception
from gemma_ray.serving.readiness import short_cause

ENGINE_LOG = """\
(EngineCore pid=7) INFO 12-02 02:16:38 [core.py:129] Initializing a V1 LLM engine
(EngineCore pid=7) ERROR 12-02 02:16:39 [core.py:1190] EngineCore failed to start.
(EngineCore pid=7) ERROR 12-02 02:16:39 [core.py:1190] Traceback (most recent call last):
(EngineCore pid=7) ERROR 12-02 02:16:39 [core.py:1190]   File "core.py", line 1, in run
(EngineCore pid=7) ERROR 12-02 02:16:39 [core.py:1190] ValueError: Head size 16 is not supported by CPU_ATTN.
"""
SECOND_HAND = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"


def test_an_engine_process_that_died_is_explained_by_its_log(tmp_path: Path):
    out, err = tmp_path / "worker.out", tmp_path / "worker.err"
    out.write_text(ENGINE_LOG)
    err.write_text(f"Traceback (most recent call last):\nRuntimeError: {SECOND_HAND}\n")
    cause = failure_cause(RuntimeError(SECOND_HAND), [out, err])
    assert cause == ("ValueError: Head size 16 is not supported by CPU_ATTN.", str(out))


def test_an_error_in_the_replica_itself_is_its_own_cause(tmp_path: Path):
    assert failure_cause(ValueError("no\n  room"), [tmp_path / "absent"]) == ("no room", "not kept")


def test_an_error_that_goes_on_over_lines_is_told_on_one(tmp_path: Path):
    log = tmp_path / "log"
    log.write_text(
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, Model architectures ['X'] are not supported [type=value_error, input_value=ArgsKwargs(...)]\n"
        "    For further information visit https://errors\n"
    )
    assert (
        last_exception(log)
        == "ValidationError: 1 validation error for ModelConfig Value error, Model architectures ['X'] are not supported"
    )


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            f"The deployment failed to start.\nRuntimeError: {FAILED_START}ValueError: no (log: /logs/w.out)\n\n",
            "ValueError: no (log: /logs/w.out)",
        ),
        (
            "The deployment failed to start.\nTraceback:\n  File x\nray.exceptions.RayTaskError: a\nImportError: no module b\n",
            "ImportError: no module b",
        ),
        ("Retrying 1 more time(s).", "Retrying 1 more time(s)."),
        ("", "no message"),
    ],
)
def test_serves_message_is_cut_to_its_cause(message: str, cause: str):
    assert short_cause(message) == cause

"""Which failures of a worker are tried again, and how often. Ray is left out: what its trainer raises is made here."""

import contextlib
import errno
import signal

import pytest

from raycluster import trainer
from raycluster.availability import Survey
from raycluster.errors import ClusterError, RemoteError, WorkerError
from raycluster.reports import Delivery
from raycluster.slices import resolve

KILLED = RemoteError.death("process 0", "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR")
OUT_OF_MEMORY = RemoteError.death("process 0", "Task was killed due to the node running low on memory.")
PREEMPTED = RemoteError.death("process 0", "The actor died because its node has died.")
RAISED = RemoteError("ValueError", "shapes", None, "")
SAVED = RemoteError("SavedError", "saved at step 7", 1, "", preempted=True)
TWO_SLICES = resolve("v5p", "2x2x1", slices=2)


@pytest.fixture
def attempts(monkeypatch):
    """Run a program whose attempts report so often and then end as listed; give where each was made, what came, and the events."""

    def attempts(*ends, reports=0, on_report=lambda report: None, max_failures=3, smaller=(), free=None):
        made, driver, remaining = [], Delivery(None), list(ends)

        @contextlib.contextmanager
        def delivery(_):
            yield driver

        def run_attempt(trainer, slice, watch):
            made.append((slice.slices, trainer))
            for step in range(reports):
                driver.count({"step": step})
            end = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            if isinstance(end, Exception):
                raise end
            if isinstance(end, signal.Signals):
                signal.raise_signal(end)
                raise SAVED
            return end

        monkeypatch.setattr(trainer, "delivery", delivery)
        monkeypatch.setattr(trainer, "run_attempt", run_attempt)
        monkeypatch.setattr(trainer, "reserved", lambda slice, found: contextlib.nullcontext())
        monkeypatch.setattr(trainer, "wait_for_slice", lambda slice, wait_s, free: Survey(()))
        monkeypatch.setattr(trainer, "first_free", lambda choices, wait_s: (free(choices) if free else choices[0], Survey(())))
        events = []
        try:
            result = trainer.run_spmd(
                print,
                lambda used: f"for {used.slices}",  # type: ignore[arg-type, return-value]
                TWO_SLICES,
                name="train",
                storage="s",
                max_failures=max_failures,
                on_report=on_report,
                on_event=events.append,
                smaller=smaller,
                build=lambda program, config, *_: config,
            )
        except (WorkerError, ClusterError, SystemExit) as e:
            result = e
        return made, result, events

    return attempts


@pytest.fixture
def attempts_of(attempts):
    """The number of attempts of a program that fails as given at every start, and the error."""

    def attempts_of(failure, reports=0, on_report=lambda report: None):
        made, error, _ = attempts(failure, reports=reports, on_report=on_report)
        assert isinstance(error, WorkerError)
        return len(made), str(error)

    return attempts_of


def test_a_worker_killed_twice_before_its_first_report_is_not_started_again(attempts_of):
    attempts, message = attempts_of(KILLED)
    assert attempts == 2
    assert "killed, probably for lack of memory. Lower the batch, the row length or the adapter's rank" in message


def test_a_worker_that_ray_kills_for_memory_twice_is_not_started_again(attempts_of):
    assert attempts_of(OUT_OF_MEMORY, reports=5)[0] == 2


@pytest.mark.parametrize(("failure", "reports"), [(KILLED, 5), (PREEMPTED, 0), (RAISED, 0)])
def test_other_failures_are_tried_as_often_as_asked(attempts_of, failure, reports):
    attempts, message = attempts_of(failure, reports)
    assert attempts == 4
    assert "memory. Lower" not in message


def test_without_reports_nobody_knows_how_far_a_worker_came(attempts_of):
    assert attempts_of(KILLED, on_report=None)[0] == 4


def test_what_was_saved_before_a_preemption_is_no_failure(attempts):
    made, result, events = attempts(SAVED, SAVED, "done", reports=1, max_failures=0)
    assert (len(made), result) == (3, "done")
    assert events[0] == "train: saved at step 7; restarted, on 2 slices of v5p 2x2x1, 2 hosts x 4 TPU, from its last checkpoint"


def test_preemptions_without_any_progress_are_failures(attempts):
    made, error, _ = attempts(SAVED, reports=0)
    assert len(made) == 4
    assert isinstance(error, WorkerError)


def test_a_preemption_is_no_error_of_the_program_whatever_its_exit_code():
    assert not SAVED.deliberate


def test_a_full_disk_or_a_folder_in_a_file_s_place_is_not_tried_again():
    failure = RemoteError.of(OSError(errno.ENOSPC, "No space left on device", "/run/metrics.jsonl"))
    assert failure.deliberate
    assert (failure.to_error().exit_code, str(failure.to_error())) == (2, "/run/metrics.jsonl: No space left on device")
    assert RemoteError.of(IsADirectoryError(errno.EISDIR, "Is a directory", "/run/claim")).exit_code == 2
    assert not RemoteError.of(OSError(errno.EIO, "Input/output error")).deliberate


def test_a_sigterm_to_the_driver_ends_it_once_the_workers_have_saved(attempts):
    made, ended, events = attempts(signal.SIGTERM, reports=5)
    assert isinstance(ended, SystemExit)
    assert ended.code == 143
    assert (len(made), events) == (1, ["saved at step 7"])


def test_a_restart_goes_on_with_fewer_slices_and_the_settings_for_those(attempts):
    smaller = [resolve("v5p", "2x2x1")]
    made, result, events = attempts(RAISED, "done", smaller=smaller, free=lambda choices: choices[1])
    assert made == [(2, "for 2"), (1, "for 1")]
    assert result == "done"
    assert "ValueError: shapes; restart 1 of 3, on v5p 2x2x1" in events[0]


def test_hosts_that_are_gone_when_it_comes_to_start_are_a_failure_like_others(attempts):
    gone = ClusterError("a host does not answer")
    assert attempts(gone, "done")[1] == "done"
    assert attempts(gone, max_failures=1)[1] is gone

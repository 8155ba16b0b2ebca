"""Which failures of a worker are tried again, and how often. Ray is left out: what its trainer raises is made here."""

import contextlib

import pytest

from raycluster import trainer
from raycluster.errors import RemoteError, WorkerError
from raycluster.slices import resolve

KILLED = RemoteError.death("process 0", "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR")
OUT_OF_MEMORY = RemoteError.death("process 0", "Task was killed due to the node running low on memory.")
PREEMPTED = RemoteError.death("process 0", "The actor died because its node has died.")
RAISED = RemoteError("ValueError", "shapes", None, "")


@pytest.fixture
def attempts_of(monkeypatch):
    """Run a program that reports so often and then fails as given, at every start; give the attempts and the error."""

    def attempts_of(failure, reports=0, on_report=lambda report: None):
        outlet, starts = [], []

        @contextlib.contextmanager
        def delivery(deliver):
            outlet.append(deliver)
            yield None

        def fit(_):
            starts.append(1)
            for step in range(reports):
                outlet[0]({"step": step})
            raise failure

        monkeypatch.setattr(trainer, "delivery", delivery)
        monkeypatch.setattr(trainer, "_trainer", lambda *arguments: None)
        monkeypatch.setattr(trainer, "_fit", fit)
        with pytest.raises(WorkerError) as error:
            trainer.run_spmd(print, {}, resolve("cpu"), name="train", storage="s", max_failures=3, on_report=on_report)
        return len(starts), str(error.value)

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

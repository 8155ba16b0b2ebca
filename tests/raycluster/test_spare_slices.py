"""Three emulated slices of one host, in one cluster for the whole module: two that make one program, or one and its spares.

The tests stand in an order: the last ones lose slices for good.
"""

import importlib
import os
import signal
import time

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from raycluster.availability import look, wait_for_slice
from raycluster.emulation import emulated_cluster
from raycluster.errors import ClusterError
from raycluster.slices import resolve
from raycluster.trainer import Limits, run_spmd, send_report

ONE = resolve("v5p", "2x2x1", emulate=True)
TWO = resolve("v5p", "2x2x1", emulate=True, slices=2)
THREE = resolve("v5p", "2x2x1", emulate=True, slices=3)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with emulated_cluster(TWO, spares=1, host_cpus=1):
        yield


@pytest.fixture
def half_of_a_slice():
    """Two of the four chips of the first slice, held by another job's placement group."""
    group = placement_group([{"TPU": 2}], bundle_label_selector=[{"ray.io/tpu-slice-name": "emulated-slice"}])
    assert group.wait(20)
    while "2 of 4 chips free" not in look(THREE).problem:
        time.sleep(0.1)
    yield
    remove_placement_group(group)
    wait_for_slice(THREE, 20, free=True)


class SavedError(Exception):
    preempted = True


def describe(config):
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    names = sorted(name for name in os.environ if name.startswith("MEGASCALE"))
    here = [jax.process_index(), int(os.environ["TPU_NAME"].removeprefix("emulated-slice-").removeprefix("emulated-slice") or 0)]
    here.append(int(os.environ.get("MEGASCALE_SLICE_ID", -1)))
    everywhere = multihost_utils.process_allgather(np.asarray(here))
    return {
        "devices": (jax.device_count(), jax.local_device_count()),
        "ranks": np.reshape(everywhere, (-1, 3)).tolist(),
        "slices": os.environ.get("MEGASCALE_NUM_SLICES"),
        "names": names,
        "TPU_NAME": os.environ["TPU_NAME"],
        "config": config,
    }


def test_two_slices_come_up_as_one_program_in_slice_order(tmp_path):
    result = run_spmd(describe, lambda used: {"slices": used.slices}, TWO, name="two", storage=tmp_path)
    assert result["devices"] == (8, 4)
    assert result["ranks"] == [[0, 0, 0], [1, 1, 1]]  # process, number in the slice's name, MEGASCALE_SLICE_ID
    assert result["slices"] == "2"
    assert "MEGASCALE_COORDINATOR_ADDRESS" in result["names"]
    assert result["config"] == {"slices": 2}


def test_a_slice_that_another_job_half_uses_is_reported_at_once(tmp_path, half_of_a_slice):
    started = time.monotonic()
    with pytest.raises(ClusterError) as refused:
        run_spmd(describe, {}, THREE, name="three", storage=tmp_path)
    assert time.monotonic() - started < 12
    said = str(refused.value)
    assert "3 slices of v5p 2x2x1" in said
    assert "is busy: 2 of the 3" in said
    assert "slice emulated-slice: TPU-V5P 2x2x1, 1 of 1 hosts alive, 2 of 4 chips free" in said
    assert "slice emulated-slice-1: TPU-V5P 2x2x1, 1 of 1 hosts alive, 4 of 4 chips free" in said


def test_a_half_used_slice_is_left_alone_where_another_is_free(tmp_path, half_of_a_slice):
    assert run_spmd(describe, {}, ONE, name="one", storage=tmp_path)["TPU_NAME"] == "emulated-slice-1"


def test_what_the_cluster_lacks_is_told_apart():
    with pytest.raises(ClusterError, match=r"does not have v6e 2x4.*no living node of type TPU-V6E\. It has: 3 x \(4 TPU, 1 CPU, TPU-V5P"):
        wait_for_slice(resolve("v6e", "2x4"))
    with pytest.raises(ClusterError, match=r"no slice of TPU-V5P has topology 2x2x2\. It has: slice emulated-slice: .*of another topology"):
        wait_for_slice(resolve("v5p", "2x2x2"))
    with pytest.raises(ClusterError, match=r"3 of the 4 slices"):
        wait_for_slice(resolve("v5p", "2x2x1", slices=4))


def hang_once(config):
    import jax

    attempt = len(list(config["marks"].iterdir()))
    (config["marks"] / str(attempt)).touch()
    send_report({"attempt": attempt})
    while attempt == 0:
        time.sleep(1)
    return {"attempt": attempt, "devices": jax.device_count()}


def test_a_worker_that_reports_no_more_is_started_again(tmp_path):
    (marks := tmp_path / "marks").mkdir()
    reports, events = [], []
    result = run_spmd(
        hang_once,
        {"marks": marks},
        ONE,
        name="hang",
        storage=tmp_path,
        max_failures=1,
        on_report=reports.append,
        on_event=events.append,
        limits=Limits(stall_s=4),
    )
    assert result == {"attempt": 1, "devices": 4}
    assert [report["attempt"] for report in reports] == [0, 1]
    assert len(events) == 1
    assert "no report for 4 s: hung?; restart 1 of 1, on v5p 2x2x1" in events[0]


def save_when_told(config):
    import jax
    from jax.experimental import multihost_utils

    first = not (config["marks"] / "saved").exists()
    multihost_utils.sync_global_devices("all have looked")
    for step in range(1, 300):
        send_report({"step": step, "pid": os.getpid(), "raylet": os.getppid(), "slice": os.environ["TPU_NAME"]})
        time.sleep(0.1)
        if step == config["signal_at"] and first and jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if multihost_utils.reached_preemption_sync_point(step):
            (config["marks"] / f"{jax.process_index()}-{step}").touch()
            multihost_utils.sync_global_devices("all have saved")
            (config["marks"] / "saved").touch()
            raise SavedError(f"saved at step {step}")
        if not first and step == 3:
            return {"slice": os.environ["TPU_NAME"]}
    raise AssertionError("no signal came")


@pytest.mark.parametrize("slice", [pytest.param(ONE, marks=pytest.mark.slow, id="1 process"), pytest.param(TWO, id="2 processes")])
def test_sigterm_to_a_worker_lets_all_save_at_one_step_and_is_no_failure(tmp_path, slice):
    (marks := tmp_path / "marks").mkdir()
    events = []
    config = {"marks": marks, "signal_at": 5}
    run_spmd(save_when_told, config, slice, name="term", storage=tmp_path, on_report=lambda _: None, on_event=events.append)
    saved = [mark.name.split("-") for mark in marks.iterdir() if "-" in mark.name]
    assert sorted(process for process, _ in saved) == [str(process) for process in range(slice.hosts)]
    assert len({step for _, step in saved}) == 1
    assert len(events) == 1
    assert "saved at step" in events[0]


@pytest.mark.slow
def test_a_slice_that_is_drained_is_saved_and_left_for_a_spare(tmp_path):
    (marks := tmp_path / "marks").mkdir()
    reports, events, drained = [], [], []

    def drain(report):
        reports.append(report)
        if report["step"] == 5 and not drained:
            node = next(node for node in ray.nodes() if node["Labels"].get("ray.io/tpu-slice-name") == report["slice"])
            drained.append(report["slice"])
            drain_node(node["NodeID"])

    config = {"marks": marks, "signal_at": None}
    result = run_spmd(save_when_told, config, ONE, name="drain", storage=tmp_path, on_report=drain, on_event=events.append)
    assert result["slice"] not in drained
    assert len(events) == 1
    assert f"({result['slice']})" in events[0]


def drain_node(node):
    """What an autoscaler does before it takes a node away."""
    raylet, messages = (importlib.import_module(f"ray.{name}") for name in ("_raylet", "core.generated.autoscaler_pb2"))
    reason = messages.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + 600) * 1000)
    accepted, why = raylet.GcsClient(address=ray.get_runtime_context().gcs_address).drain_node(node, reason, "preempted", deadline_ms)
    assert accepted, why


def outlive(config):
    first = not (config["marks"] / "first").exists()
    (config["marks"] / "first").touch()
    send_report({"raylet": os.getppid(), "slice": os.environ["TPU_NAME"]})
    while first:
        time.sleep(1)
    return {"slice": os.environ["TPU_NAME"]}


def test_a_slice_whose_host_dies_is_replaced_by_a_spare(tmp_path):
    (marks := tmp_path / "marks").mkdir()
    lost, events = [], []

    def kill(report):
        if not lost:
            lost.append(report["slice"])
            os.kill(report["raylet"], signal.SIGKILL)

    result = run_spmd(outlive, {"marks": marks}, ONE, name="lost", storage=tmp_path, max_failures=1, on_report=kill, on_event=events.append)
    assert result["slice"] not in lost
    assert len(events) == 1
    assert f"restart 1 of 1, on v5p 2x2x1, 1 host x 4 TPU, emulated ({result['slice']}), from its last checkpoint" in events[0]
    while not look(THREE).missing:  # the run moved on before the control service gave the node up
        time.sleep(0.1)
    with pytest.raises(ClusterError, match=r"does not have 3 slices.*[12] of the 3 slices\."):
        wait_for_slice(THREE)

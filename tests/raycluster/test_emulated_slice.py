"""Two emulated hosts with two devices each, in one cluster for the whole module: real Ray, real JAX processes."""

import os
import signal
from pathlib import Path

import pytest

from raycluster.availability import wait_for_slice
from raycluster.emulation import emulated_cluster
from raycluster.errors import ClusterError, WorkerError
from raycluster.placement import map_tasks, run_task
from raycluster.session import check_answers, connect
from raycluster.slices import resolve
from raycluster.trainer import run_spmd, send_report

SLICE = resolve("v5p", "2x2x1", devices_per_host=2, emulate=True)
REPORTS = 50


class NoRowsError(Exception):
    exit_code = 2


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with emulated_cluster(SLICE):
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What one run returned and reported."""
    reports = []
    result = run_spmd(observe, {"factor": 3.0}, SLICE, name="run", storage=tmp_path_factory.mktemp("ray"), on_report=reports.append)
    return result, reports


def observe(config):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 1), ("fsdp", "tp"))
    rank = jax.process_index()
    local = np.full(2, 10.0 ** (2 * rank)) * [1, 10]  # over both processes: 1, 10, 100, 1000
    rows = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("fsdp")), local, (4,))
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(rows * config["factor"])
    for step in range(REPORTS):
        send_report({"process": rank, "step": step})
    return {
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "local_devices": jax.local_device_count(),
        "process": rank,
        "total": float(total),
        "slice": os.environ["TPU_NAME"],
        "folder": str(Path.cwd()),
    }


def refuse(config):
    import jax
    from jax.experimental import multihost_utils

    if jax.process_index() == 1:
        raise NoRowsError("data.rows is empty. Give it rows")
    multihost_utils.sync_global_devices("never joined by process 1")


def stumble(config):
    raise KeyError("lost")


def die_once(config):
    import jax
    from jax.experimental import multihost_utils

    mark = Path(config["mark"])
    first = not mark.exists()
    multihost_utils.sync_global_devices("both have looked")
    if jax.process_index() == 1 and first:
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    multihost_utils.sync_global_devices("both are alive")
    return {"first": first}


def test_one_process_a_host_sees_all_devices(run):
    result, _ = run
    assert (result["processes"], result["devices"], result["local_devices"]) == (2, 4, 2)


def test_a_sum_over_the_mesh_crosses_the_processes(run):
    result, _ = run
    assert result["total"] == 3 * 1111


def test_process_0_gives_the_result_and_ran_on_the_slice(run):
    result, _ = run
    assert result["process"] == 0
    assert result["slice"] == "emulated-slice"


def test_relative_paths_mean_the_same_in_driver_and_worker(run):
    result, _ = run
    assert result["folder"] == str(Path.cwd())


def test_every_report_arrives_in_order(run):
    _, reports = run
    for process in range(2):
        assert [report["step"] for report in reports if report["process"] == process] == list(range(REPORTS))


def test_an_error_raised_on_purpose_keeps_its_words_and_code_and_is_not_retried(tmp_path):
    attempts = []
    with pytest.raises(WorkerError) as failure:
        run_spmd(refuse, {}, SLICE, name="refuse", storage=tmp_path, max_failures=3, on_report=attempts.append)
    assert str(failure.value) == "data.rows is empty. Give it rows"
    assert failure.value.exit_code == 2
    assert "NoRowsError" in failure.value.traceback


@pytest.mark.slow
def test_a_killed_worker_is_restarted(tmp_path):
    assert run_spmd(die_once, {"mark": str(tmp_path / "mark")}, SLICE, name="die", storage=tmp_path, max_failures=1) == {"first": False}


@pytest.mark.slow
def test_a_worker_that_keeps_dying_ends_the_run_in_one_line(tmp_path):
    with pytest.raises(WorkerError, match=r"^a worker failed: process 1 ended without an answer") as failure:
        run_spmd(die_once, {"mark": str(tmp_path / "mark")}, SLICE, name="die", storage=tmp_path)
    assert failure.value.exit_code == 1


def square(x):
    return x * x


def test_tasks_run_elsewhere_and_all_results_come():
    assert run_task(os.getpid) != os.getpid()
    assert sorted(map_tasks(square, range(40), num_cpus=1)) == [x * x for x in range(40)]


def test_a_task_gets_its_environment():
    assert run_task(os.getenv, "JAX_PLATFORMS", env={"JAX_PLATFORMS": "cpu"}) == "cpu"


def test_a_failing_task_says_what_it_said():
    with pytest.raises(WorkerError, match=r"^a worker failed: KeyError: 'lost'$"):
        run_task(stumble, {})
    with pytest.raises(WorkerError, match=r"^a worker failed: its process ended without an answer"):
        run_task(os._exit, 3)


def test_more_cpus_than_a_node_has_are_refused():
    with pytest.raises(ClusterError, match="num_cpus = 1000"):
        run_task(square, 2, num_cpus=1000)


def test_a_slice_that_the_cluster_lacks_is_refused_with_what_it_has():
    with pytest.raises(ClusterError, match=r"does not have v6e 2x4.*2 x \(2 TPU, 2 CPU, TPU-V5P, v5p-8\)"):
        wait_for_slice(resolve("v6e", "2x4"))


def test_a_living_cluster_answers_at_its_address():
    import ray

    check_answers(ray.get_runtime_context().gcs_address)


def test_a_connected_process_keeps_its_connection():
    import ray

    with connect(SLICE):
        assert ray.is_initialized()
    assert ray.is_initialized()


def test_a_second_cluster_in_one_process_is_refused():
    with pytest.raises(ClusterError, match="already connected"), emulated_cluster(SLICE):
        pass

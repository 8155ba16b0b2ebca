"""PyTorch programs on the processes of a slice: two plain CPU hosts, in one cluster for the whole module; real Ray, real gloo."""

import os
import signal
from pathlib import Path

import pytest

from raycluster.errors import ClusterError, WorkerError
from raycluster.reports import send_report
from raycluster.session import connect
from raycluster.slices import resolve
from raycluster.torch_trainer import check_runs_torch, torch_trainer, worker_resources
from raycluster.trainer import run_spmd

SLICE = resolve("cpu", hosts=1, devices_per_host=2)
REPORTS = 20


class NoRowsError(Exception):
    exit_code = 2


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with connect(SLICE):
        yield


def observe(config):
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    total = torch.tensor([10.0**rank * config["factor"]])
    dist.all_reduce(total)
    for step in range(REPORTS):
        send_report({"rank": rank, "step": step})
    return {
        "rank": rank,
        "ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
        "total": total.item(),
        "folder": str(Path.cwd()),
        "device": os.environ["ACCELERATE_TORCH_DEVICE"],
    }


def refuse(config):
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise NoRowsError("data.rows is empty. Give it rows")
    dist.barrier()


def die_once(config):
    import torch.distributed as dist

    mark = Path(config["mark"])
    first = not mark.exists()
    dist.barrier()
    if dist.get_rank() == 1 and first:
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return {"first": first}


def test_one_process_a_device_sums_over_gloo_and_every_report_arrives_in_order(tmp_path):
    reports = []
    result = run_spmd(observe, {"factor": 3.0}, SLICE, name="run", storage=tmp_path, build=torch_trainer, on_report=reports.append)
    assert result == {"rank": 0, "ranks": 2, "backend": "gloo", "total": 33.0, "folder": str(Path.cwd()), "device": "cpu"}
    for rank in range(2):
        assert [report["step"] for report in reports if report["rank"] == rank] == list(range(REPORTS))


@pytest.mark.slow
def test_an_error_raised_on_purpose_keeps_its_words_and_code_and_is_not_retried(tmp_path):
    with pytest.raises(WorkerError) as failure:
        run_spmd(refuse, {}, SLICE, name="refuse", storage=tmp_path, build=torch_trainer, max_failures=3)
    assert str(failure.value) == "data.rows is empty. Give it rows"
    assert failure.value.exit_code == 2


@pytest.mark.slow
def test_a_killed_worker_is_restarted(tmp_path):
    assert run_spmd(
        die_once, {"mark": str(tmp_path / "mark")}, SLICE, name="die", storage=tmp_path, build=torch_trainer, max_failures=1
    ) == {"first": False}


def test_a_real_tpu_slice_is_refused():
    with pytest.raises(ClusterError, match="PyTorch program runs on GPUs or CPUs"):
        check_runs_torch(resolve("v6e", "2x4"))


def test_a_gpu_each_and_on_cpu_a_share_of_the_hosts_one():
    assert worker_resources(resolve("h100", devices_per_host=2)) == {"GPU": 1}
    assert worker_resources(resolve("cpu", hosts=2, devices_per_host=1)) == {"CPU": 1}
    assert 3 * worker_resources(resolve("cpu", devices_per_host=3))["CPU"] <= 1

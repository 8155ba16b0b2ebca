"""Two emulated slices of two hosts each, and a third of which one host dies: Ray's own reservation by slice name."""

import os
import signal
import time

import pytest

from raycluster.availability import wait_for_slice
from raycluster.emulation import emulated_cluster
from raycluster.errors import ClusterError
from raycluster.slices import resolve
from raycluster.trainer import run_spmd

pytestmark = pytest.mark.slow
TWO = resolve("v5p", "2x2x2", emulate=True, slices=2)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with emulated_cluster(TWO, host_cpus=1):
        yield


def places(config):
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    number = int(os.environ["TPU_NAME"].removeprefix("emulated-slice-").removeprefix("emulated-slice") or 0)
    here = [jax.process_index(), number, int(os.environ["TPU_WORKER_ID"]), int(os.environ["MEGASCALE_SLICE_ID"]), os.getppid()]
    return np.reshape(multihost_utils.process_allgather(np.asarray(here)), (-1, 5)).tolist(), jax.device_count()


def test_ranks_go_slice_by_slice_and_host_by_host_and_a_dead_host_makes_its_slice_incomplete(tmp_path):
    ranks, devices = run_spmd(places, {}, TWO, name="places", storage=tmp_path)
    assert devices == 16
    assert [rank[:4] for rank in ranks] == [[0, 0, 0, 0], [1, 0, 1, 0], [2, 1, 0, 1], [3, 1, 1, 1]]

    os.kill(ranks[3][4], signal.SIGKILL)  # the raylet of the last host
    deadline = time.monotonic() + 60
    while True:
        try:
            wait_for_slice(TWO)
        except ClusterError as e:
            assert "slice emulated-slice-1 is incomplete, 1 of its 2 hosts live. It has: slice emulated-slice: " in str(e)
            assert "slice emulated-slice-1: TPU-V5P 2x2x2, 1 of 2 hosts alive, 4 of 4 chips free (incomplete)" in str(e)
            break
        assert time.monotonic() < deadline
        time.sleep(1)
    alone = run_spmd(lambda config: os.environ["TPU_NAME"], {}, resolve("v5p", "2x2x2", emulate=True), name="one", storage=tmp_path)
    assert alone == "emulated-slice"

"""Plain CPU processes, on a cluster of their own."""

import pytest

from raycluster.emulation import _check_memory
from raycluster.errors import ClusterError
from raycluster.session import connect
from raycluster.slices import resolve
from raycluster.trainer import run_spmd


def count(config):
    import jax
    from jax.experimental import multihost_utils

    ranks = multihost_utils.process_allgather(jax.numpy.asarray([jax.process_index()]))
    return {"processes": jax.process_count(), "devices": jax.device_count(), "ranks": sorted(ranks.ravel().tolist())}


def test_two_processes_form_one_program(tmp_path):
    slice = resolve("cpu", hosts=2, devices_per_host=2)
    with connect(slice):
        assert run_spmd(count, {}, slice, name="count", storage=tmp_path) == {"processes": 2, "devices": 4, "ranks": [0, 1]}


def test_too_little_memory_is_said_before_anything_starts():
    with pytest.raises(ClusterError, match=r"needs 1048576\.0 GiB of memory .* GiB are free"):
        _check_memory(1 << 50)

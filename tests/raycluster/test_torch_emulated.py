"""A node with two emulated H100: scheduled as GPUs, run on the CPU."""

import pytest
from test_torch_processes import observe

from raycluster.session import connect
from raycluster.slices import resolve
from raycluster.torch_trainer import torch_trainer
from raycluster.trainer import run_spmd

pytestmark = pytest.mark.slow


def test_a_process_for_each_emulated_gpu(tmp_path):
    slice = resolve("h100", hosts=1, devices_per_host=2, emulate=True)
    with connect(slice):
        result = run_spmd(observe, {"factor": 3.0}, slice, name="run", storage=tmp_path, build=torch_trainer)
    assert (result["ranks"], result["backend"], result["device"], result["total"]) == (2, "gloo", "cpu", 33.0)

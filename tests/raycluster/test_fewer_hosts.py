"""Two emulated GPU hosts, of which one dies for good: the program goes on with the other."""

import os
import signal

import pytest

from raycluster.errors import ClusterError
from raycluster.session import connect
from raycluster.slices import fallbacks, resolve
from raycluster.trainer import Limits, run_spmd, send_report

pytestmark = pytest.mark.slow
HOSTS = resolve("h100", hosts=2, devices_per_host=2, emulate=True)


def outlive(config):
    import jax

    if jax.process_count() == 2:
        send_report({"process": jax.process_index(), "raylet": os.getppid()})
        signal.pause()
    return {"processes": jax.process_count(), "devices": jax.device_count(), "config": config}


def test_a_program_goes_on_with_the_hosts_that_are_left(tmp_path):
    events, killed = [], []

    def kill(report):
        if report["process"] == 1 and not killed:
            killed.append(report)
            os.kill(report["raylet"], signal.SIGKILL)

    with connect(HOSTS):
        result = run_spmd(
            outlive,
            lambda used: {"hosts": used.hosts},
            HOSTS,
            name="fewer",
            storage=tmp_path,
            max_failures=2,
            on_report=kill,
            on_event=events.append,
            smaller=fallbacks(HOSTS, 1),
            limits=Limits(wait_s=20),
        )
        assert result == {"processes": 1, "devices": 2, "config": {"hosts": 1}}
        assert "on h100 1 host x 2 GPU, emulated" in events[-1]
        with pytest.raises(ClusterError, match=r"does not have h100 2 hosts x 2 GPU, emulated: 1 of the 2 hosts\. It has: host "):
            run_spmd(outlive, {}, HOSTS, name="both", storage=tmp_path)

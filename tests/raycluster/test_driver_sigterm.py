"""SIGTERM to the program that holds the cluster, and to its whole process group: its workers save before anything goes down."""

import importlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from raycluster.daemon_groups import daemons_in_own_groups

PROGRAM = """
    import pathlib, sys, time
    from raycluster.emulation import emulated_cluster
    from raycluster.slices import resolve
    from raycluster.trainer import run_spmd, send_report

    class SavedError(Exception):
        preempted = True

    def train(config):
        from jax.experimental import multihost_utils

        for step in range(1, 600):
            send_report({"step": step})
            time.sleep(0.1)
            if multihost_utils.reached_preemption_sync_point(step):
                time.sleep(3)  # a checkpoint takes a while
                pathlib.Path(config["folder"], "saved").write_text(str(step))
                raise SavedError("saved")

    def say(report):
        if report["step"] == 3:
            sys.stdout.write("training\\n")
            sys.stdout.flush()

    slice = resolve("v5p", "2x2x1", emulate=True)
    with emulated_cluster(slice, head_cpus=2, host_cpus=1):
        run_spmd(train, {"folder": sys.argv[1]}, slice, name="train", storage=sys.argv[1], on_report=say)
        sys.stdout.write("went on\\n")
"""


def test_sigterm_to_the_drivers_group_waits_for_the_workers_to_save(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    command, pipe = [sys.executable, program, tmp_path], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=Path.cwd(), process_group=0)
    try:
        assert process.stdout
        assert process.stdout.readline() == "training\n"
        os.killpg(process.pid, signal.SIGTERM)  # `timeout`, a container's stop
        sent = time.monotonic()
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM, err
    assert int((tmp_path / "saved").read_text()) > 3
    assert time.monotonic() - sent > 3
    assert out == ""
    assert "SIGTERM came: the workers save and end, within 120 s" in err


def test_only_the_work_around_puts_rays_daemons_into_groups_of_their_own():
    def group_of_a_daemon():
        info = services.start_ray_process(["sleep", "60"], "sleeper", fate_share=True)
        try:
            return os.getpgid(info.process.pid)
        finally:
            info.process.kill()
            info.process.wait()

    services = importlib.import_module("ray._private.services")
    assert group_of_a_daemon() == os.getpgrp(), "Ray does it itself now: remove raycluster/daemon_groups.py"
    with daemons_in_own_groups():
        assert group_of_a_daemon() != os.getpgrp()
    assert group_of_a_daemon() == os.getpgrp()

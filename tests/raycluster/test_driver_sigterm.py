"""SIGTERM to the program that holds the cluster: its workers save before anything goes down."""

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

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


def test_sigterm_to_the_driver_waits_for_the_workers_to_save(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    process = subprocess.Popen(
        [sys.executable, program, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGTERM)
        sent = time.monotonic()
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM, err
    assert int((tmp_path / "saved").read_text()) > 3
    assert time.monotonic() - sent > 3
    assert out == ""

"""A program with an emulated cluster ends in every way that a program can; nothing of it stays."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from raycluster.emulation import _remove_abandoned

PROGRAM = """
    import os, sys, time
    from raycluster.emulation import emulated_cluster
    from raycluster.slices import resolve
    from raycluster.trainer import Limits, run_spmd, send_report

    def train(config):
        import jax
        send_report({"devices": jax.device_count(), "folder": os.environ["RAY_TMPDIR"]})
        time.sleep(config["sleep_s"])
        return {"processes": jax.process_count()}

    def say(report):
        sys.stdout.write(f"{report['devices']} {report['folder']}\\n")
        sys.stdout.flush()

    LIMITS = Limits(save_s=2)  # its function does not listen
    slice = resolve("v5p", "2x2x1", emulate=True)
    with emulated_cluster(slice, head_cpus=2, host_cpus=1):
        result = run_spmd(train, {"sleep_s": float(sys.argv[1])}, slice, name="train", storage=sys.argv[2], on_report=say, limits=LIMITS)
        sys.stdout.write(f"{result['processes']}\\n")
        raise RuntimeError("something else went wrong")
"""


@pytest.fixture
def start(tmp_path):
    """Start the program; give it and the folder that names its processes once it trains."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    started = []

    def start(sleep_s):
        process = subprocess.Popen(
            [sys.executable, program, str(sleep_s), tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
        )
        started.append(process)
        assert process.stdout and process.stderr
        first = process.stdout.readline().split()
        assert first, process.stderr.read()
        devices, folder = first
        assert devices == "4"
        assert Path(folder).is_dir()
        return process, folder

    yield start
    for process in started:
        process.kill()
        process.communicate()


def processes_of(folder):
    """Those with the folder in their environment or among their open files: Ray's agents overwrite their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            named = process.environ().get("RAY_TMPDIR") == folder or any(file.path.startswith(folder) for file in process.open_files())
            if named and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def wait_until_gone(folder, timeout_s):
    deadline = time.monotonic() + timeout_s
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [process.cmdline() for process in left]


def test_an_exception_after_a_run_on_one_host_of_four_leaves_nothing(start):
    process, folder = start(0.5)
    out, err = process.communicate(timeout=120)
    assert out == "1\n"
    assert "RuntimeError: something else went wrong" in err
    assert processes_of(folder) == []
    assert not Path(folder).exists()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupt_stops_the_training_and_leaves_nothing(start, number):
    process, folder = start(600)
    assert processes_of(folder)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGINT: -signal.SIGINT, signal.SIGTERM: 128 + signal.SIGTERM}[number], err
    assert processes_of(folder) == []
    assert not Path(folder).exists()


def test_an_interrupt_while_ray_starts_leaves_nothing(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    process = subprocess.Popen([sys.executable, program, "0", tmp_path], stderr=subprocess.PIPE, text=True, cwd=Path.cwd())

    def agents():
        family = psutil.Process(process.pid).children(recursive=True)
        return [member for member in family if member.is_running() and "Agent" in "".join(member.cmdline()[:1])]

    while not agents():
        assert process.poll() is None
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert [member for member in family if member.is_running() and member.status() != psutil.STATUS_ZOMBIE] == []


def test_a_killed_program_takes_its_processes_with_it(start):
    process, folder = start(600)
    assert "ray::DashboardAgent" in [running.cmdline()[0] for running in processes_of(folder)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert wait_until_gone(folder, timeout_s=10) == []
    _remove_abandoned()  # what the next emulated cluster does first
    assert not Path(folder).exists()

"""Training that is killed again and again ends as training that was left alone: the same losses and the same adapter, bit for bit.

A run of the stage itself, in a process of its own, on an emulated slice with a spare. In turn the worker process, the host (its raylet) and
the driver are killed with SIGKILL, each a random number of steps after the start before it went on. Some leave half a line of metrics.
Six kills, or `GEMMA_RAY_KILLS` of them.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from gemma_ray.training.checkpoints import read_checkpoint
from gemma_ray.training.metrics import read_metrics

KILLS = int(os.environ.get("GEMMA_RAY_KILLS", "6"))
STEPS, SEED = 20 + 4 * KILLS, 7
LIMIT_S = 600.0


def write_recipe(folder: Path, model: Path) -> Path:
    folder.mkdir()
    recipe = {
        "model": {"source": str(model), "dtype": "float32"},
        "data": {"examples": 200, "heldout_problems": 1, "max_seq_len": 256, "near_duplicates": None},
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.1},
        "train": {"steps": STEPS, "batch_size": 4, "learning_rate": 3e-3, "warmup_steps": 5, "checkpoint_every": 3, "tensorboard": False},
        "mesh": {"fsdp": 2, "tp": 2},
        "cluster": {"accelerator": "v5p", "topology": "2x2x1", "emulate": True, "spare_slices": 1},
        "run": {"dir": str(folder / "run"), "cache_dir": str(folder.parent / "cache")},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


class Run:
    """The stage as a process; `kill` ends a part of it."""

    def __init__(self, recipe: Path):
        self.recipe, self.log = recipe, recipe.with_name("log.txt")
        self.metrics = recipe.with_name("run") / "metrics.jsonl"
        self.claim_before = ""
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "workloads.train", str(self.recipe)], stdout=log, stderr=log)

    def wait_for_steps(self, count: int) -> int:
        """Wait until this start has made `count` steps; the last step made."""
        deadline = time.monotonic() + LIMIT_S
        first = None
        while True:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, f"{count} steps were not made:\n{self.log.read_text()[-3000:]}"
            if self.claim() not in ("", self.claim_before):
                last = max((m.step for m in read_metrics(self.metrics)), default=0)
                first = last if first is None else first
                if last >= first + count:
                    return last
            time.sleep(0.02)

    def claim(self) -> str:
        path = self.metrics.with_name("claim")
        return path.read_text() if path.exists() else ""

    def kill(self, what: str) -> None:
        self.claim_before = self.claim()
        worker = self.worker()
        if what == "host":  # its worker may go on for ten seconds, and stops earlier where the next start has begun
            worker.parent().kill()  # type: ignore[union-attr]
            return
        process = self.process if what == "driver" else worker
        process.kill()
        psutil.wait_procs([worker], timeout=LIMIT_S)
        with self.metrics.open("a") as metrics:
            metrics.write('{"step": 1')
        if what == "driver":
            process.wait()
            self.start()

    def worker(self) -> psutil.Process:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                if process.name().startswith("ray::RayTrainWo"):
                    return process
            time.sleep(0.1)
        raise AssertionError("no worker")


@pytest.mark.slow
def test_kills_change_nothing(tiny_gemma: Path, tmp_path: Path) -> None:
    alone = Run(write_recipe(tmp_path / "alone", tiny_gemma))
    assert alone.process.wait(LIMIT_S) == 0, alone.log.read_text()[-3000:]
    killed, at = Run(write_recipe(tmp_path / "killed", tiny_gemma)), []
    chance = random.Random(SEED)
    for number in range(KILLS):
        at.append(killed.wait_for_steps(chance.randint(1, 6)))
        killed.kill(("worker", "host", "driver")[number % 3])
    assert killed.process.wait(LIMIT_S) == 0, killed.log.read_text()[-3000:]
    expected, found = read_metrics(alone.metrics), read_metrics(killed.metrics)
    print(f"killed at {at}; loss {expected[0].loss:.4f} to {expected[-1].loss:.4f}")
    assert [m.step for m in found] == [m.step for m in expected] == list(range(1, STEPS + 1))
    assert [(m.loss, m.grad_norm, m.loss_tokens) for m in found] == [(m.loss, m.grad_norm, m.loss_tokens) for m in expected]
    adapters = [read_checkpoint(tmp_path / name / "run" / "checkpoints").parameters for name in ("alone", "killed")]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(np.array_equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    assert expected[-1].loss < expected[0].loss

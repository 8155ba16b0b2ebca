"""Training that is killed again and again ends as training that was left alone: the same losses and the same adapter, bit for bit.

A run of the stage itself, in a process of its own, on an emulated slice with a spare. In turn the worker process, the host (its raylet) and
the driver are killed with SIGKILL, each when another random step has been reached.
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

STEPS, KILLS, SEED = 60, 20, 7
LIMIT_S = 600.0


def write_recipe(folder: Path, model: Path) -> Path:
    folder.mkdir()
    recipe = {
        "model": {"source": str(model), "dtype": "float32"},
        "data": {"examples": 120, "heldout_problems": 1, "max_seq_len": 160, "near_duplicates": None},
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
        self.file_before = 0
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "workloads.train", str(self.recipe)], stdout=log, stderr=log)

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        # A start that goes on writes the file anew, so lines of the one that was killed do not count.
        while self._file() in (0, self.file_before) or not any(m.step >= step for m in read_metrics(self.metrics)[-1:]):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, f"step {step} was not reached:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.1)

    def _file(self) -> int:
        return self.metrics.stat().st_ino if self.metrics.exists() else 0

    def kill(self, what: str) -> None:
        self.file_before = self._file()
        if what == "driver":
            self.process.kill()
            self.process.wait()
            self.start()
            return
        worker = self.worker()
        (worker.parent() if what == "host" else worker).kill()  # type: ignore[union-attr]
        psutil.wait_procs([worker], timeout=30)

    def worker(self) -> psutil.Process:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                if process.name().startswith("ray::RayTrainWo"):
                    return process
            time.sleep(0.1)
        raise AssertionError("no worker")


@pytest.mark.slow
@pytest.mark.skipif("GEMMA_RAY_KILLS" not in os.environ, reason="takes a quarter of an hour; set GEMMA_RAY_KILLS=1")
def test_twenty_kills_change_nothing(tiny_gemma: Path, tmp_path: Path) -> None:
    alone = Run(write_recipe(tmp_path / "alone", tiny_gemma))
    assert alone.process.wait(LIMIT_S) == 0, alone.log.read_text()[-3000:]
    steps = sorted(random.Random(SEED).sample(range(2, STEPS - 1), KILLS))
    killed = Run(write_recipe(tmp_path / "killed", tiny_gemma))
    for number, step in enumerate(steps):
        killed.wait_for_step(step)
        killed.kill(("worker", "host", "driver")[number % 3])
    assert killed.process.wait(LIMIT_S) == 0, killed.log.read_text()[-3000:]
    expected, found = read_metrics(alone.metrics), read_metrics(killed.metrics)
    print(f"killed at {steps}; loss {expected[0].loss:.4f} to {expected[-1].loss:.4f}")
    assert [m.step for m in found] == [m.step for m in expected] == list(range(1, STEPS + 1))
    assert [(m.loss, m.grad_norm, m.loss_tokens) for m in found] == [(m.loss, m.grad_norm, m.loss_tokens) for m in expected]
    adapters = [read_checkpoint(tmp_path / name / "run" / "checkpoints").parameters for name in ("alone", "killed")]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(np.array_equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    assert expected[-1].loss < expected[0].loss

"""The road at its smallest, by the command that users type: real Ray, JAX workers, vLLM and Icarus.

It begins with a kill in the middle of training, and ends with what is refused.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gemma_ray.training.metrics import read_metrics

SMALLEST = {
    "model.pretrain.modules": 200,
    "model.pretrain.steps": 4,
    "model.pretrain.batch_size": 4,
    "model.pretrain.warmup_steps": 1,
    "train.steps": 40,
    "train.batch_size": 4,
    "train.warmup_steps": 1,
    "train.checkpoint_every": 2,
    "data.examples": 100,
    "data.heldout_problems": 31,
    "convert.verify_prompts": 2,
    "convert.verify_new_tokens": 8,
    "eval.limit": 3,
    "eval.max_tokens": 24,
    "bench.requests": 3,
    "bench.qps": "[2, 8]",
    "bench.contexts": "[16, 64]",
    "bench.output_tokens": 4,
    "serve.port": 8431,
}


def command(*words: str, root: Path) -> list[str]:
    settings = {**SMALLEST, "run.dir": root / "run", "run.cache_dir": root / "cache"}
    defaults = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "gemma_ray.cli", words[0], *defaults, *words[1:]]


def gemma_ray(*words: str, root: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*words, root=root), capture_output=True, text=True, check=False, env=_environment())
    assert done.returncode == code, done.stderr[-3000:]
    return done


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in the middle of training and then went the whole road."""
    folder = tmp_path_factory.mktemp("road")
    metrics = folder / "run" / "metrics.jsonl"
    killed = subprocess.Popen(command("train", "quickstart-cpu", root=folder), env=_environment(), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and killed.poll() is None and not (folder / "run" / "checkpoints" / "2").is_dir():
        time.sleep(0.2)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL, "training ended before it was killed"
    assert metrics.exists(), "training did not get to a checkpoint"
    assert not (folder / "run" / ".stages" / "train.json").exists()
    done = gemma_ray("quickstart", "--json", root=folder)
    assert json.loads(done.stdout)["report"] == str(folder / "run" / "report.html")
    return folder


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_training_went_on_from_the_last_whole_checkpoint(root: Path) -> None:
    steps = [m.step for m in read_metrics(root / "run" / "metrics.jsonl")]
    assert steps == list(range(1, 41))


def test_the_exported_model_is_the_trained_one_in_three_programs(root: Path) -> None:
    verification = read(root / "run" / "verify.json")
    assert verification["passed"] is True
    assert verification["max_abs_logit_diff"] <= 1e-3
    assert verification["vllm_greedy_equal"] == verification["tunix_greedy_equal"] == verification["prompts"] == 2


def test_both_models_were_sampled_and_graded(root: Path) -> None:
    for folder, model in (("eval-base", "base"), ("eval", "tuned")):
        summary = read(root / "run" / folder / "summary.json")
        assert (summary["problems"], summary["samples_per_problem"], summary["model"]) == (3, 5, model)
        assert summary["harness_errors"] == 0
        assert summary["set_aside"] == []
        assert sum(summary["verdicts"].values()) == 15
        samples = [json.loads(line) for line in (root / "run" / folder / "samples.jsonl").read_text().splitlines()]
        assert len({(s["task_id"], s["sample"]) for s in samples}) == 15


def test_every_cell_was_measured(root: Path) -> None:
    cells = {path.name: read(path) for path in (root / "run" / "bench").glob("*.json")}
    assert sorted(cells) == ["16_2.json", "16_8.json", "64_2.json", "64_8.json"]
    assert all(cell["completed"] == 3 and cell["failed"] == 0 and cell["ttft_ms"]["p50"] > 0 for cell in cells.values())


def test_the_report_shows_the_runs_own_numbers(root: Path) -> None:
    page = (root / "run" / "report.html").read_text()
    loss = read_metrics(root / "run" / "metrics.jsonl")[-1].loss
    assert f"{loss:.3f}" in page
    assert "Emulated slice" in page


def test_a_second_start_does_nothing_again(root: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in (root / "run" / "model").iterdir()}
    done = gemma_ray("quickstart", root=root)
    for stage in ("prepare", "train", "convert", "verify"):
        assert f"── {stage}: already done" in done.stderr
    assert {p: p.stat().st_mtime_ns for p in (root / "run" / "model").iterdir()} == before


def test_samples_of_ones_own_are_graded_without_a_cluster(root: Path) -> None:
    heldout = next((root / "cache" / "data").glob("*/heldout"))
    references = sorted(heldout.glob("*_ref.sv"))[:3]
    samples = root / "mine.jsonl"
    lines = [
        {"task_id": path.name.removesuffix("_ref.sv"), "sample": 0, "code": path.read_text().replace("RefModule", "TopModule")}
        for path in references
    ]
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("eval", "quickstart-cpu", "--samples", str(samples), "--json", "--set", f"eval.dataset={heldout}")
    done = gemma_ray(*words, "--set", f"run.dir={root / 'graded'}", root=root)
    assert json.loads(done.stdout)["verdicts"] == {"pass": 3}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "nowhere.yaml"), "no recipe file 'nowhere.yaml'"),
        (("train", "quickstart-cpu", "--set", "train.stepz=3"), "Did you mean 'train.steps'"),
        (("train", "quickstart-cpu", "--set", "cluster.accelerator=v9"), "v9"),
        (("train", "quickstart-cpu", "--set", "cluster.topology=3x3x3"), "3x3x3"),
        (("train", "quickstart-cpu", "--set", "mesh.tp=4", "--set", "mesh.fsdp=1"), "KV heads of the global layers 2 are not divisible"),
        (("train", "quickstart-cpu", "--set", "mesh.fsdp=3"), "fsdp"),
        (("train", "quickstart-cpu", "--set", "model.source=/nowhere"), "/nowhere"),
        (("data", "prepare", "quickstart-cpu", "--set", "data.source=/nowhere.jsonl"), "/nowhere.jsonl"),
        (("convert", "quickstart-cpu", "--set", "run.dir=/tmp/gemma-ray-nothing-here"), "run `gemma-ray train` first"),
        (("verify", "quickstart-cpu", "--set", "run.dir=/tmp/gemma-ray-nothing-here"), "run `gemma-ray convert` first"),
        (("train", "quickstart-cpu", "--set", "run.dir=gs://bucket/run"), "gs://bucket/run"),
    ],
)
def test_wrong_input_is_one_short_message_and_exit_code_2(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "gemma_ray.cli", *words], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) <= 3
    assert list(tmp_path.iterdir()) == []

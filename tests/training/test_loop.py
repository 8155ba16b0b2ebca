"""The training loop on a real mesh: it learns, touches LoRA alone, resumes exactly, and refuses what does not belong together."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_ray.data.prepare import prepare_text
from gemma_ray.errors import CheckpointError, RecipeError, ResourceError, StageError
from gemma_ray.training.checkpoints import latest_step, read_checkpoint
from gemma_ray.training.claim import Claim
from gemma_ray.training.config import LoraConfig, MeshConfig, TrainConfig
from gemma_ray.training.loop import Trainer, TrainJob, train
from gemma_ray.training.metrics import MetricsFile, StepMetrics, read_metrics
from gemma_ray.training.sharding import make_mesh

LENGTH = 32


def silent(report: dict[str, object]) -> None:
    del report


@pytest.fixture(scope="module")
def data(short_gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "rows"
    prepare_text(
        [f"module m{i} (input [{i}:0] a, output y);\n  assign y = ^a;\nendmodule\n" for i in range(60)], short_gemma, LENGTH, folder
    )
    return folder


def job(model: Path, data: Path, out: Path, steps: int, **settings: object) -> TrainJob:
    config = TrainConfig.model_validate(
        {"steps": steps, "batch_size": 8, "learning_rate": 1e-2, "warmup_steps": 2, "checkpoint_every": 3, **settings}
    )
    return TrainJob(
        model=model,
        data=data,
        out=out,
        dtype="float32",
        seq_len=LENGTH,
        mesh=MeshConfig(fsdp=4, tp=2),
        train=config,
        lora=LoraConfig(rank=4, alpha=8),
        made_from={"train.seed": 0},
    )


@pytest.fixture(scope="module")
def straight(short_gemma: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps without interruption."""
    out = tmp_path_factory.mktemp("straight")
    result = train(job(short_gemma, data, out, 6), silent)
    assert (result.step, result.resumed_from) == (6, 0)
    return out


def test_a_step_takes_as_long_as_its_data_also_where_a_checkpoint_is_saved(
    short_gemma: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_batch = Trainer.next_batch

    def slow(trainer: Trainer) -> Any:
        time.sleep(0.5)
        return next_batch(trainer)

    monkeypatch.setattr(Trainer, "next_batch", slow)
    whole = job(short_gemma, data, tmp_path, 6)
    train(whole, silent)
    assert min(metrics.step_s for metrics in read_metrics(whole.metrics)) > 0.1


def test_a_resumed_run_is_the_uninterrupted_run_to_the_last_bit(short_gemma: Path, data: Path, straight: Path, tmp_path: Path) -> None:
    whole = job(short_gemma, data, tmp_path, 6)

    class KilledError(Exception):
        pass

    def stop_after_4(report: dict[str, object]) -> None:
        if report.get("step") == 4:
            raise KilledError

    with pytest.raises(KilledError):
        train(whole, stop_after_4)
    deadline = time.monotonic() + 60  # checkpoints are written in the background
    while latest_step(whole.checkpoints) != 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert latest_step(whole.checkpoints) == 3
    with whole.metrics.open("a") as f:
        f.write('{"step": 5, "lo')  # cut short by the kill
    assert train(whole, silent).resumed_from == 3
    expected, found = read_checkpoint(straight / "checkpoints"), read_checkpoint(whole.checkpoints)
    assert expected.parameters.keys() == found.parameters.keys()
    assert all(np.array_equal(expected.parameters[name], found.parameters[name]) for name in expected.parameters)
    losses = [[m.loss for m in read_metrics(path)] for path in (straight / "metrics.jsonl", whole.metrics)]
    assert losses[0] == losses[1]
    assert [m.step for m in read_metrics(whole.metrics)] == [1, 2, 3, 4, 5, 6]


def test_it_learns_and_a_checkpoint_holds_lora_optimizer_and_data_state(straight: Path) -> None:
    metrics = read_metrics(straight / "metrics.jsonl")
    assert metrics[-1].loss < metrics[0].loss - 0.3
    assert metrics[0].loss_tokens == 8 * (LENGTH - 1)
    assert metrics[0].grad_norm > 0
    checkpoint = read_checkpoint(straight / "checkpoints")
    assert all("_lora_" in name for name in checkpoint.parameters)
    assert checkpoint.lora == LoraConfig(rank=4, alpha=8)
    assert sorted(p.name for p in (straight / "checkpoints" / "6").iterdir() if p.is_dir()) == ["model_params", "optimizer_state"]
    saved = json.loads((straight / "checkpoints" / "6" / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]
    assert saved["data"] == {"next_index": 6}


def test_a_finished_run_is_left_as_it_is(short_gemma: Path, data: Path, straight: Path) -> None:
    before = (straight / "metrics.jsonl").read_bytes()
    result = train(job(short_gemma, data, straight, 6), silent)
    assert (result.step, result.resumed_from) == (6, 6)
    assert (straight / "metrics.jsonl").read_bytes() == before


def test_checkpoints_of_other_inputs_are_refused(short_gemma: Path, data: Path, straight: Path) -> None:
    other = replace(job(short_gemma, data, straight, 8), made_from={"train.seed": 1})
    with pytest.raises(CheckpointError, match=r"step 6 was trained otherwise: train\.seed was 0, is 1"):
        train(other, silent)


def test_a_loss_that_is_not_finite_stops_before_it_is_saved(short_gemma: Path, data: Path, tmp_path: Path) -> None:
    broken = job(short_gemma, data, tmp_path, 9, learning_rate=9e15, warmup_steps=0)
    with pytest.raises(StageError, match="loss"):
        train(broken, silent)
    assert latest_step(broken.checkpoints) in (None, 1)


def test_a_mesh_of_another_number_of_devices_is_refused() -> None:
    with pytest.raises(RecipeError, match="needs 4 devices; there are 8"):
        make_mesh(2, 2)


def test_steps_after_the_checkpoint_are_dropped_from_the_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0, Claim(tmp_path))
    for step in range(1, 6):
        file.append(StepMetrics(step, 1.0, 0.1, 1.0, 10.0, 5, 0.1))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\xff\x00 no line\n" + b"".join(lines[1:]) + b'{"step": 6')
    assert [m.step for m in read_metrics(path)] == [1, 2, 3, 4, 5]
    again = MetricsFile(path, 3, Claim(tmp_path))
    assert [m.step for m in read_metrics(path)] == [1, 2, 3]
    with pytest.raises(StageError, match=f"claim: the run now belongs to {socket.gethostname()} pid {os.getpid()}"):
        file.append(StepMetrics(6, 1.0, 0.1, 1.0, 10.0, 5, 0.1))
    assert [m.step for m in read_metrics(path)] == [1, 2, 3]
    file = again
    file.path = Path("/dev/full")
    with pytest.raises(ResourceError, match=r"/dev/full: step 6 cannot be written \(No space left"):
        file.append(StepMetrics(6, 1.0, 0.1, 1.0, 10.0, 5, 0.1))


@pytest.mark.parametrize("make", ["nothing", "an empty folder"])
def test_no_checkpoint_is_an_error_that_says_what_to_run(tmp_path: Path, make: str) -> None:
    folder = tmp_path / "checkpoints"
    if make == "an empty folder":
        folder.mkdir()
    with pytest.raises(CheckpointError, match="gemma-ray train"):
        read_checkpoint(folder)


def test_another_adapter_is_named_before_anything_is_restored(short_gemma: Path, data: Path, straight: Path) -> None:
    other = replace(job(short_gemma, data, straight, 8), lora=LoraConfig(rank=5, alpha=8), made_from={"lora.rank": 5})
    with pytest.raises(CheckpointError, match=r"otherwise: lora\.rank was not set, is 5; train\.seed was 0, is not set"):
        train(other, silent)


def test_a_run_that_is_past_the_steps_is_not_called_done(short_gemma: Path, data: Path, straight: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds step 6, and train\.steps is 3; set train\.steps to 6 or more, or another run\.dir"):
        train(job(short_gemma, data, straight, 3), silent)


DAMAGES: dict[str, Callable[[Path], object]] = {  # to a folder of checkpoints 3 and 6
    "an empty newer folder": lambda folder: (folder / "99").mkdir(),
    "metadata cut short": lambda folder: (folder / "6" / "_CHECKPOINT_METADATA").write_text('{"custom'),
    "other metadata": lambda folder: (folder / "6" / "_CHECKPOINT_METADATA").write_text("{}"),
    "no optimizer": lambda folder: shutil.rmtree(folder / "6" / "optimizer_state"),
    "no shapes": lambda folder: cut(folder / "6" / "model_params" / "_METADATA"),
    "no array data": lambda folder: shutil.rmtree(folder / "6" / "optimizer_state" / "d"),
    "half a manifest": lambda folder: cut(folder / "6" / "optimizer_state" / "manifest.ocdbt"),
}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_is_used(
    short_gemma: Path, data: Path, straight: Path, tmp_path: Path, damage: str
) -> None:
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    DAMAGES[damage](tmp_path / "checkpoints")
    damaged, resumed_from = (99, 6) if damage == "an empty newer folder" else (6, 3)
    seen_by_convert = "manifest" not in damage and "array data" not in damage  # those are of the optimizer
    with (
        contextlib.nullcontext()
        if not seen_by_convert
        else pytest.raises(CheckpointError, match=rf"{damaged}: (cannot be read|not a whole checkpoint) .*remove it")
    ):
        read_checkpoint(tmp_path / "checkpoints")
    notes: list[str] = []
    result = train(job(short_gemma, data, tmp_path, 6), lambda report: notes.append(str(report.get("note"))))
    assert result.resumed_from == resumed_from
    assert any(f"checkpoint {damaged} cannot be read" in note and f"damaged-{damaged}" in note for note in notes)
    assert (tmp_path / "checkpoints" / f"damaged-{damaged}").is_dir()
    expected, found = read_checkpoint(straight / "checkpoints"), read_checkpoint(tmp_path / "checkpoints")
    assert all(np.array_equal(expected.parameters[name], found.parameters[name]) for name in expected.parameters)


def test_when_no_checkpoint_can_be_read_training_does_not_begin_anew(short_gemma: Path, data: Path, straight: Path, tmp_path: Path) -> None:
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    for step in (3, 6):
        cut(tmp_path / "checkpoints" / str(step) / "optimizer_state" / "manifest.ocdbt")
    with pytest.raises(CheckpointError, match="none of its checkpoints can be read; remove the folder to train anew"):
        train(job(short_gemma, data, tmp_path, 7), silent)


def test_a_file_in_the_folder_s_place_is_named(short_gemma: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="a file where the folder"):
        train(job(short_gemma, data, tmp_path, 6), silent)

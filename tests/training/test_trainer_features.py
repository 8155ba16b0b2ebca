"""What a run watches and writes: evaluation, early stopping, the best checkpoint, bad batches, dropout, boards, a full disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_ray.data.prepare import prepare_text
from gemma_ray.data.source import batches, held_out, rows_of_batch
from gemma_ray.errors import DataError, StageError, ToolError
from gemma_ray.training.checkpoints import best_step, read_checkpoint, whole_steps
from gemma_ray.training.config import LoraConfig, MeshConfig, TrainConfig
from gemma_ray.training.guard import SpikeGuard
from gemma_ray.training.heldout import Patience
from gemma_ray.training.loop import TrainJob, train
from gemma_ray.training.metrics import StepMetrics, read_metrics

LENGTH = 32


@pytest.fixture(scope="module")
def data(short_gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of one text over and over, and one of noise."""
    folder = tmp_path_factory.mktemp("data") / "rows"
    noise = "".join(chr(33 + i) for i in np.random.default_rng(0).integers(0, 90, 60))
    prepare_text(["assign y = ^a;\n"] * 500 + [noise], short_gemma, LENGTH, folder)
    return folder


def job(model: Path, data: Path, out: Path, lora: dict[str, Any] | None = None, **settings: Any) -> TrainJob:
    defaults = {"steps": 6, "batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 2, "checkpoint_every": 3, "tensorboard": False}
    return TrainJob(
        model=model,
        data=data,
        out=out,
        dtype="float32",
        seq_len=LENGTH,
        mesh=MeshConfig(fsdp=4, tp=2),
        train=TrainConfig.model_validate({**defaults, **settings}),
        lora=LoraConfig.model_validate({"rank": 4, "alpha": 8, **(lora or {})}),
        made_from={},
    )


def run(wanted: TrainJob) -> tuple[list[StepMetrics], list[str]]:
    """Its metrics, and its notes."""
    notes: list[str] = []
    train(wanted, lambda report: notes.append(report["note"]) if "note" in report else None)
    return read_metrics(wanted.metrics), notes


def test_held_out_rows_are_never_trained_on_and_rows_can_be_named(data: Path) -> None:
    order: dict[str, Any] = {"batch_size": 4, "seq_len": LENGTH, "seed": 3, "eval_batches": 2}
    held = np.concatenate([batch["tokens"] for batch in held_out(data, **order)])
    assert len(held) == 8
    everything = batches(data, **{**order, "eval_batches": 0})
    total = len(rows_of_batch(data, 0, **{**order, "batch_size": 1, "eval_batches": 0}))
    assert total == 1
    trained = batches(data, **order)
    names: set[str] = set()
    for number in range(20):
        batch, rows = next(trained), rows_of_batch(data, number, **order)
        assert len(batch["tokens"]) == len(rows) == 4
        names |= set(rows)
    again = [rows_of_batch(data, number, **order) for number in range(20)]
    assert set().union(*again) == names
    assert next(everything)["tokens"].shape == (4, LENGTH)
    with pytest.raises(DataError, match=r"lower train\.eval_batches"):
        next(held_out(data, **{**order, "eval_batches": 10_000}))


def test_evaluation_is_the_loss_of_the_held_out_tokens_and_the_best_checkpoint_stays(short_gemma: Path, data: Path, tmp_path: Path) -> None:
    wanted = job(
        short_gemma, data, tmp_path, eval_batches=2, eval_every=2, checkpoint_every=2, keep_checkpoints=1, steps=8, schedule="constant"
    )
    metrics, notes = run(wanted)
    losses = {m.step: m.eval_loss for m in metrics if m.eval_loss is not None}
    assert list(losses) == [2, 4, 6, 8]
    assert losses[8] < losses[2]
    assert all(m.eval_loss_full == pytest.approx(m.eval_loss) for m in metrics if m.eval_loss is not None)  # raw text: every token
    assert metrics[0].eval_loss_assistant is None
    assert sum("evaluation loss" in note for note in notes) == 4
    best = min(losses, key=lambda step: losses[step])
    assert best_step(wanted.checkpoints) == best
    assert whole_steps(wanted.checkpoints) == sorted({best, 8}, reverse=True)


def test_training_stops_when_evaluation_gets_no_better_and_is_done(short_gemma: Path, data: Path, tmp_path: Path) -> None:
    # At a rate of nothing no evaluation is below the first.
    wanted = job(
        short_gemma, data, tmp_path, eval_batches=1, eval_every=1, early_stopping=3, learning_rate=1e-30, steps=50, checkpoint_every=50
    )
    metrics, notes = run(wanted)
    assert [m.step for m in metrics] == [1, 2, 3, 4]
    assert "no lower one in 3 evaluations: stopping early at step 4 of 50" in notes[-1]
    assert whole_steps(wanted.checkpoints) == [4]
    result = train(wanted, lambda _: None)
    assert (result.step, result.resumed_from, result.stopped_early) == (4, 4, True)


def test_a_spike_is_named_with_its_rows_and_changes_nothing(short_gemma: Path, data: Path, tmp_path: Path) -> None:
    # The text is learnt by heart, so the row of noise is a spike in whichever batch it comes.
    settings = {"steps": 80, "spike": 3.0, "checkpoint_every": 500, "batch_size": 4, "seed": 1}
    with pytest.raises(StageError, match=r"at step \d+: a spike above .* Its rows are shard-00000-of-00001\.array_record:\d+") as stopped:
        train(job(short_gemma, data, tmp_path / "stop", **settings), lambda _: None)
    assert "train.bad_batch=skip to go on without" in str(stopped.value)
    metrics, notes = run(job(short_gemma, data, tmp_path / "skip", bad_batch="skip", **settings))
    skipped = [m.step for m in metrics if m.skipped]
    assert f"at step {skipped[0]}:" in str(stopped.value)
    assert len(metrics) == 80
    assert any(f"step {skipped[0]}: loss" in note and "skipped" in note for note in notes)
    around = {m.step: m.loss for m in metrics}
    assert around[skipped[0] + 1] < around[skipped[0]] / 3


def test_skipping_ends_when_every_batch_is_bad(short_gemma: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"5 bad batches in a row"):
        train(job(short_gemma, data, tmp_path, steps=20, bad_batch="skip", learning_rate=9e15, warmup_steps=0), lambda _: None)


def test_the_limit_of_a_step_depends_on_the_losses_before_it_alone() -> None:
    guard = SpikeGuard(4.0)
    for step in range(1, 22):
        assert guard.limit(step) == np.inf
        guard.add(step, 2.0, skipped=False)
    assert guard.limit(22) == 8.0  # twenty losses, those of steps 1 to 20
    guard.add(22, 100.0, skipped=True)
    assert SpikeGuard(4.0, [(step, 2.0, False) for step in range(1, 24)]).limit(24) == guard.limit(24) == 8.0
    assert SpikeGuard(None, [(step, 2.0, False) for step in range(1, 24)]).limit(24) == np.inf


def test_patience_counts_from_the_least_loss() -> None:
    patience = Patience(2, [3.0, 2.0, 2.5])
    assert not patience.is_over
    patience.add(2.0)
    assert patience.is_over


def test_dropout_changes_training_not_evaluation_and_resumes_to_the_bit(short_gemma: Path, data: Path, tmp_path: Path) -> None:
    def losses(out: str, dropout: float, **settings: Any) -> list[StepMetrics]:
        wanted = job(
            short_gemma, data, tmp_path / out, lora={"dropout": dropout}, eval_batches=1, eval_every=1, schedule="constant", **settings
        )
        return run(wanted)[0]

    without, whole = losses("without", 0.0), losses("whole", 0.5)
    assert whole[0].loss == without[0].loss  # B is zero
    assert whole[2].loss != without[2].loss  # the first update is at a rate of 0
    losses("parts", 0.5, steps=3)
    parts = losses("parts", 0.5, steps=6)
    assert [m.loss for m in parts] == [m.loss for m in whole]
    assert [m.eval_loss for m in parts] == [m.eval_loss for m in whole]
    of_whole, of_parts = (read_checkpoint(tmp_path / out / "checkpoints").parameters for out in ("whole", "parts"))
    assert all(np.array_equal(of_whole[name], of_parts[name]) for name in of_whole)


@pytest.mark.slow
def test_what_remat_computes_again_has_the_dropout_that_it_had(short_gemma: Path, data: Path, tmp_path: Path) -> None:
    kept, again = (
        run(job(short_gemma, data, tmp_path / remat, lora={"dropout": 0.5}, schedule="constant", remat=remat, micro_batches=1))[0]
        for remat in ("none", "layer")
    )
    assert again[-1].loss == pytest.approx(kept[-1].loss, rel=1e-4)


def test_rslora_scales_by_the_root_of_the_rank() -> None:
    assert LoraConfig(rank=16, alpha=32).scale == 2.0
    assert LoraConfig(rank=16, alpha=32, rslora=True).scale == 8.0


def test_boards_and_a_trace_are_written(short_gemma: Path, data: Path, tmp_path: Path) -> None:
    run(job(short_gemma, data, tmp_path, tensorboard=True, profile_steps=2, profile_after=1))
    assert any((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    assert any((tmp_path / "profile").rglob("*.xplane.pb"))
    with pytest.raises(ToolError, match="pip install wandb"):
        run(job(short_gemma, data, tmp_path / "other", wandb_project="gemma"))


def test_times_and_rates_add_up(short_gemma: Path, data: Path, tmp_path: Path) -> None:
    wanted = job(short_gemma, data, tmp_path)
    metrics, notes = run(TrainJob(**{**vars(wanted), "flops_per_token": 1e6, "peak_flops": 1e12}))
    for m in metrics:
        assert m.compute_s is not None
        assert 0 < m.compute_s <= m.step_s + 1e-6
        assert m.padded_tokens_per_s == pytest.approx(4 * LENGTH / m.step_s)
        assert m.mfu == pytest.approx(m.tokens_per_s * 1e6 / 1e12)
        assert m.loss_full == pytest.approx(m.loss)
    assert notes[0].startswith("q_proj → q_einsum layers 0-1 (2)")
    assert "parameters are trained" in notes[1]
    assert "optimizer" in notes[1]
    assert "6 steps of 4 rows of up to 32 tokens" in notes[2]
    assert len(notes) == 3


FULL = """
import resource, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_trainer_features import job
from gemma_ray.training.loop import train
model, data, out = map(Path, sys.argv[1:])
wanted = job(model, data, out, steps=9)
def limit(report):
    if report.get("step") == 4:
        while not (out / "checkpoints" / "3").is_dir():
            time.sleep(0.1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
train(wanted, limit)
"""


def test_a_checkpoint_that_cannot_be_written_is_said_and_the_one_before_stays(short_gemma: Path, data: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: the same error comes from the same write. metrics.jsonl stays below it."""
    program = FULL.format(tests=str(Path(__file__).parent))
    ended = subprocess.run(
        [sys.executable, "-c", program, str(short_gemma), str(data), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "CheckpointError" in ended.stderr, (ended.returncode, ended.stderr[-2000:])
    assert "a checkpoint cannot be written" in ended.stderr
    assert "step 3 is the newest whole one" in ended.stderr
    assert whole_steps(tmp_path / "checkpoints") == [3]
    assert train(job(short_gemma, data, tmp_path, steps=9), lambda _: None).resumed_from == 3

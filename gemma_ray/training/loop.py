"""The SPMD training loop: what every process of the mesh runs.

Tunix's PeftTrainer does the stepping. `Trainer` adds what it lacks: the data iterator's state in every checkpoint (also the last), a
resume that continues the data instead of skipping through it, exactly `steps` batches, and one line of metrics a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from tunix.sft import hooks
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

from gemma_ray.data.source import batches
from gemma_ray.errors import StageError
from gemma_ray.models.attention import pick_kernel
from gemma_ray.models.gemma4 import read_text_config
from gemma_ray.training.batches import check_same_batch, local_rows, place_batch
from gemma_ray.training.build import build_model
from gemma_ray.training.checkpoints import check_continuable, latest_step, unreadable_named
from gemma_ray.training.config import LoraConfig, MeshConfig, TrainConfig
from gemma_ray.training.metrics import MetricsFile, StepMetrics, read_metrics
from gemma_ray.training.optimizer import build_optimizer, learning_rate_schedule
from gemma_ray.training.sharding import make_mesh
from gemma_ray.training.step import Step

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrainJob:
    """Everything a process needs to train. Paths must be visible from every host."""

    model: Path
    data: Path
    checkpoints: Path
    metrics: Path
    dtype: str
    seq_len: int
    mesh: MeshConfig
    train: TrainConfig
    lora: LoraConfig
    made_from: str
    """Fingerprint of what determines the result; a checkpoint with another one is refused."""


@dataclass(frozen=True)
class TrainResult:
    """How training ended: the last step, its loss in nats, and the step this start resumed from (0 for none)."""

    step: int
    loss: float
    resumed_from: int


def train(job: TrainJob, report: Report) -> TrainResult:
    """Train to `job.train.steps`, from the newest checkpoint when there is one; call it in every process with the same job.

    `report` is called on process 0 with a dictionary a step. Raises CheckpointError when the newest checkpoint is damaged, belongs to
    another recipe or is past `job.train.steps`, StageError when the loss is not finite or processes disagree on the data.
    """
    check_continuable(job.checkpoints, job.made_from, job.train.steps)
    mesh = make_mesh(job.mesh.fsdp, job.mesh.tp)
    adapter = job.lora if job.train.mode == "lora" else None
    with mesh:
        kernel = pick_kernel(job.train.attention, mesh.devices.flat[0].platform, job.seq_len, read_text_config(job.model))
        t = job.train
        model = build_model(job.model, mesh, job.dtype, adapter, t.seed, t.remat, kernel, t.splash_block)
        trainer = Trainer(model, job, mesh, report)
        if trainer.train_steps < job.train.steps:
            trainer.train(())
        else:
            trainer.checkpoint_manager.close()
    return TrainResult(step=trainer.train_steps, loss=trainer.last_loss, resumed_from=trainer.resumed_from)


class Trainer(PeftTrainer):
    """PeftTrainer on a checkpointable data source, writing metrics.jsonl."""

    def __init__(self, model: Any, job: TrainJob, mesh: jax.sharding.Mesh, report: Report):
        options = ocp.CheckpointManagerOptions(save_interval_steps=job.train.checkpoint_every, max_to_keep=job.train.keep_checkpoints)
        config = TrainingConfig(
            eval_every_n_steps=job.train.steps + 1,
            checkpoint_root_directory=str(job.checkpoints.absolute()),
            checkpointing_options=options,
        )
        with unreadable_named(job.checkpoints, latest_step(job.checkpoints)):
            super().__init__(model, build_optimizer(job.train), config)
        self.job, self.mesh, self.report = job, mesh, report
        self.resumed_from = self.train_steps
        before = read_metrics(job.metrics) if self.resumed_from else []
        self.last_loss = before[-1].loss if before else math.nan
        self._step: Step | None = None
        self.schedule = learning_rate_schedule(job.train)
        self.batches = self._batches(local_rows(mesh, job.train.batch_size))
        if self.resumed_from:
            self.batches.set_state(self._restored_custom_metadata["data"])
        self.metrics_file = MetricsFile(job.metrics, self.resumed_from) if jax.process_index() == 0 else None
        self.with_data_hooks(_NextBatch())
        self._step_started = time.perf_counter()
        self._clock = ThreadPoolExecutor(1)  # waits for each step, whose numbers are read later
        self._completed: dict[int, Future[float]] = {}

    def next_batch(self) -> dict[str, Any] | None:
        """The next global batch on the mesh; None when the last step is done."""
        if self.train_steps >= self.job.train.steps:
            return None
        whole = self._whole_batch() if self.train_steps == self.resumed_from else None
        placed = place_batch(next(self.batches), self.mesh, self.job.train.batch_size)
        if whole is not None:
            check_same_batch(whole, placed)
        return placed

    def _whole_batch(self) -> dict[str, np.ndarray]:
        """All rows of the batch that comes next."""
        whole = self._batches(None)
        whole.set_state(self.batches.get_state())
        return next(whole)

    def _batches(self, rows: list[int] | None) -> Any:
        job = self.job
        return batches(job.data, batch_size=job.train.batch_size, seq_len=job.seq_len, seed=job.train.seed, rows=rows)

    def jit_train_and_eval_step(self, skip_jit: bool = False, cache_nnx_graph: bool = False) -> Any:
        """What Tunix calls for each batch, in the shape in which it looks for it; there is no evaluation."""
        del skip_jit, cache_nnx_graph
        if self._step is None:
            self._shard_optimizer(self.mesh)
            self._step = Step(self.model, self.optimizer, self.job.train.micro_batches, self.mesh.devices.flat[0].device_kind)
        return partial(self._step), None

    def custom_checkpoint_metadata(self) -> dict[str, Any]:
        """What a checkpoint holds besides arrays: Grain's state, the adapter's definition, and what it was made from."""
        return {
            "data": self.batches.get_state(),
            "made_from": self.job.made_from,
            "mode": self.job.train.mode,
            "lora": self.job.lora.model_dump(mode="json"),
        }

    def _save_last_checkpoint(self) -> None:  # upstream's drops the metadata
        if self.checkpoint_manager.latest_step() != self.train_steps:
            self.checkpoint_manager.save(
                self.train_steps,
                self.model,
                self.optimizer,
                save_only_lora_params=self._lora_enabled,
                custom_metadata=self.custom_checkpoint_metadata(),
                force=True,
            )

    def _post_process_train_step(self, aux: Any) -> None:
        assert self._buffered_train_metrics is not None
        self._buffered_train_metrics.additional_metrics.update({key: ([count], np.sum) for key, count in aux.items()})
        step, loss = self.train_steps + 1, self._buffered_train_metrics.losses[-1]
        self._completed[step] = self._clock.submit(_time_of, loss)
        if step % self.job.train.checkpoint_every == 0:
            self._check_finite(loss, step)  # waits for the step: never save a broken one

    def _check_finite(self, loss: Any, step: int) -> None:
        if not math.isfinite(float(loss)):
            raise StageError(f"the loss is {float(loss)} at step {step}; lower train.learning_rate or set train.clip_norm")

    def _log_metrics(self, loss: Any, step: int | None = None, additional_metrics: dict[str, Any] | None = None) -> None:
        """Called a step late, so that the next one is under way while this one's numbers are read."""
        assert step is not None
        assert additional_metrics is not None
        self._check_finite(loss, step)
        now = self._completed.pop(step).result()
        step_s, self._step_started = now - self._step_started, now
        self.last_loss = float(loss)
        if self.metrics_file is None:
            return
        metrics = StepMetrics(
            step=step,
            loss=self.last_loss,
            learning_rate=float(np.asarray(self.schedule(step - 1))),
            grad_norm=float(additional_metrics["grad_norm"]),
            tokens_per_s=float(additional_metrics["tokens"]) / step_s,
            loss_tokens=int(additional_metrics["loss_tokens"]),
            step_s=step_s,
        )
        self.metrics_file.append(metrics)
        self.report({"step": step, "steps": self.job.train.steps, "loss": metrics.loss, "tokens_per_s": metrics.tokens_per_s})


def _time_of(result: Any) -> float:
    jax.block_until_ready(result)
    return time.perf_counter()


class _NextBatch(hooks.DataHooks):
    """Feeds the trainer from its own iterator, so that a resume does not read and skip."""

    def load_next_train_batch(self, train_ctx: Any) -> Any:
        return train_ctx.next_batch()

    def load_next_eval_batch(self, train_ctx: Any) -> Any:
        return None

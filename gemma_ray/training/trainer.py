"""Tunix's PeftTrainer with its traps mended.

upstream (google/tunix, sft/peft_trainer.py)                              here
skips through the data again after a resume, and reads a batch too many   `next_batch`, from Grain's saved state
shards local rows by global sizes                                         `place_batch`, and a check of the first batch of every start
averages micro-batches whatever loss tokens they have                     `Step`
the last checkpoint has no metadata; a damaged one ends the run           `Checkpoints`
evaluates by the mean of batch means                                      `heldout.evaluate`
a loss of nan goes on                                                     `Step` leaves the weights as they were, `_check` stops
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from tunix.sft import hooks
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix.sft.profiler import Profiler, ProfilerOptions

from gemma_ray.data.shards import read_manifest
from gemma_ray.data.source import batches, held_out, rows_of_batch
from gemma_ray.errors import StageError
from gemma_ray.models.gemma4 import read_text_config
from gemma_ray.training.batches import check_same_batch, local_rows, place_batch
from gemma_ray.training.boards import boards
from gemma_ray.training.build import state_paths
from gemma_ray.training.checkpointing import Checkpoints
from gemma_ray.training.claim import Claim
from gemma_ray.training.clock import StepClock
from gemma_ray.training.guard import IN_A_ROW, SpikeGuard
from gemma_ray.training.heldout import EvalLoss, Patience, evaluate, scope_means
from gemma_ray.training.layout import layout_of
from gemma_ray.training.metrics import MetricsFile, StepMetrics, read_metrics
from gemma_ray.training.optimizer import build_optimizer, learning_rate_schedule, warmup_steps
from gemma_ray.training.step import Batch, Step
from gemma_ray.training.targets import target_table

if TYPE_CHECKING:
    from gemma_ray.training.loop import Report, TrainJob


class Trainer(PeftTrainer):
    """PeftTrainer on a checkpointable data source, writing metrics.jsonl."""

    def __init__(self, model: Any, job: TrainJob, mesh: jax.sharding.Mesh, report: Report):
        self.job, self.mesh, self.report = job, mesh, report
        is_first, settings = jax.process_index() == 0, job.train
        config = TrainingConfig(eval_every_n_steps=settings.steps + 1)
        self.boards = boards(job.out, settings) if is_first else None
        super().__init__(model, build_optimizer(settings), config, self.boards)
        claim = Claim(job.out) if is_first else None
        self.checkpoint_manager = Checkpoints(job.checkpoints, settings.checkpoint_every, settings.keep_checkpoints, self._note)
        step, metadata = self.checkpoint_manager.restore(self.model, self.optimizer, self._lora_enabled)
        self._train_steps = self._iter_steps = self.resumed_from = step
        self._prof = _profiler(job, step)
        before = [m for m in read_metrics(job.metrics) if m.step <= step]
        self.last_loss = before[-1].loss if before else math.nan
        self.guard = SpikeGuard(settings.spike, [(m.step, m.loss, m.skipped) for m in before])
        self.patience = Patience(settings.early_stopping, [m.eval_loss for m in before if m.eval_loss is not None])
        self.evaluated: dict[int, EvalLoss] = {}
        self.schedule = learning_rate_schedule(settings)
        self.rows = local_rows(mesh, settings.batch_size)
        self.batches = self._batches(self.rows)
        if step:
            self.batches.set_state(metadata["data"])
        self.metrics_file = MetricsFile(job.metrics, step, claim) if claim else None
        self.with_data_hooks(_NextBatch())
        self._step: Step | None = None
        self.clock = StepClock()
        self._host_s: dict[int, tuple[float, float]] = {}

    def next_batch(self) -> Batch | None:
        """The next global batch on the mesh; None when the last step is done."""
        if self.train_steps >= self.job.train.steps or self.patience.is_over:
            return None
        assert self._step is not None
        self._step.limit = self.guard.limit(self.train_steps + 1)
        with self.clock.input():
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

    @property
    def _order(self) -> dict[str, Any]:
        """What says which rows make up which batch."""
        t = self.job.train
        return {"batch_size": t.batch_size, "seq_len": self.job.seq_len, "seed": t.seed, "eval_batches": t.eval_batches}

    def _batches(self, rows: list[int] | None) -> Any:
        return batches(self.job.data, rows=rows, **self._order)

    def jit_train_and_eval_step(self, skip_jit: bool = False, cache_nnx_graph: bool = False) -> Any:
        """What Tunix calls for each batch, in the shape in which it looks for it; evaluation goes by `_evaluate`."""
        del skip_jit, cache_nnx_graph
        if self._step is None:
            self._shard_optimizer(self.mesh)
            self._say_layout()
            t = self.job.train
            dropout = t.seed if t.mode == "lora" and self.job.lora.dropout else None
            self._step = Step(self.model, self.optimizer, t.micro_batches, self.mesh.devices.flat[0].device_kind, dropout)
        return partial(self._step), None

    def custom_checkpoint_metadata(self) -> dict[str, Any]:
        """What a checkpoint holds besides arrays: Grain's state, the adapter's definition, what it was made from, and its evaluation."""
        eval_loss = self.checkpoint_manager.eval_losses.get(self.train_steps)
        return {
            "data": self.batches.get_state(),
            "made_from": self.job.made_from,
            "mode": self.job.train.mode,
            "lora": self.job.lora.model_dump(mode="json"),
            "eval_loss": eval_loss,
        }

    def _save_last_checkpoint(self) -> None:  # upstream's drops the metadata
        metadata = self.custom_checkpoint_metadata()
        only_lora = self._lora_enabled
        self.checkpoint_manager.save(
            self.train_steps, self.model, self.optimizer, save_only_lora_params=only_lora, custom_metadata=metadata, force=True
        )

    def _post_process_train_step(self, aux: Any) -> None:
        """Called when a step is under way and not yet counted."""
        assert self._buffered_train_metrics is not None
        self._buffered_train_metrics.additional_metrics.update({key: ([value], _first) for key, value in aux.items()})
        step, loss, t = self.train_steps + 1, self._buffered_train_metrics.losses[-1], self.job.train
        self.clock.dispatched(step, loss)
        self._host_s[step] = (self.clock.taken(), self.checkpoint_manager.seconds)
        self.checkpoint_manager.seconds = 0.0
        if self._is_saved(step):
            self._check(step, loss, aux["applied"])  # waits for the step: nothing is saved before it is known to be good
        if t.eval_batches and (self._is_saved(step) or step % t.eval_every == 0):
            self._evaluate(step)

    def _is_saved(self, step: int) -> bool:
        return step % self.job.train.checkpoint_every == 0 or step == self.job.train.steps

    def _write_train_metrics(self) -> None:
        """Upstream's is a step late; a step that is saved is written before it is, so that a resume finds its line."""
        super()._write_train_metrics()
        if self._is_saved(self.train_steps) or self.checkpoint_manager.orbax.reached_preemption(self.train_steps):
            super()._write_train_metrics()

    def _evaluate(self, step: int) -> None:
        assert self._step is not None
        held = held_out(self.job.data, rows=self.rows, **self._order)
        placed = (place_batch(batch, self.mesh, self.job.train.batch_size) for batch in held)
        found = evaluate(placed, self._step.evaluate)
        self.evaluated[step], self.checkpoint_manager.eval_losses[step] = found, found.loss
        self.patience.add(found.loss)
        self._note(f"step {step}: evaluation loss {found.loss:.4f}{self._patience_note(step)}")

    def _patience_note(self, step: int) -> str:
        if not self.patience.is_over:
            return ""
        return f"; no lower one in {self.patience.waited} evaluations: stopping early at step {step} of {self.job.train.steps}"

    def _check(self, step: int, loss: Any, applied: Any) -> None:
        """Raise StageError for a batch that made no update, unless such batches are to be skipped and there are not too many."""
        if bool(applied):
            return
        skipped, t = self.guard.skipped_in_a_row + 1, self.job.train
        if t.bad_batch == "skip" and skipped < IN_A_ROW:
            return
        names = rows_of_batch(self.job.data, step - 1, **self._order)
        rows = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        what = f"a spike above {self.guard.limit(step):.4g}" if math.isfinite(float(loss)) else "not finite, or its gradient is not"
        remedy = "lower train.learning_rate or set train.clip_norm" + (
            "" if t.bad_batch == "skip" else ", look at those rows, or set train.bad_batch=skip to go on without them"
        )
        times = f"; {skipped} bad batches in a row" if t.bad_batch == "skip" else ""
        raise StageError(f"the loss is {float(loss):.4g} at step {step}: {what}{times}. Its rows are {rows} of {self.job.data}; {remedy}")

    def _log_metrics(self, loss: Any, step: int | None = None, additional_metrics: dict[str, Any] | None = None) -> None:
        """Called a step late, so that the next one is under way while this one's numbers are read."""
        assert step is not None
        assert additional_metrics is not None
        found = additional_metrics
        self._check(step, loss, found["applied"])
        self.last_loss = float(loss)
        self.guard.add(step, self.last_loss, not found["applied"])
        metrics = self._metrics(step, found)
        if metrics.skipped:
            self._note(f"step {step}: loss {self.last_loss:.4g}; its batch was skipped")
        if self.metrics_file is None or self.boards is None:
            return
        self.metrics_file.append(metrics)
        self.boards.write(metrics)
        progress = {"loss": metrics.loss, "tokens_per_s": metrics.tokens_per_s, "mfu": metrics.mfu}
        self.report({"step": step, "steps": self.job.train.steps, **progress})

    def _metrics(self, step: int, found: dict[str, Any]) -> StepMetrics:
        took, (input_s, checkpoint_s), job = self.clock.completed(step), self._host_s.pop(step), self.job
        useful, padded = float(found["tokens"]) / took.step_s, float(found["padded_tokens"]) / took.step_s
        by_scope = scope_means(found["by_scope"], found["scope_tokens"])
        evaluated = self.evaluated.pop(step, None)
        known = job.flops_per_token is not None and job.peak_flops is not None
        return StepMetrics(
            step=step,
            loss=self.last_loss,
            learning_rate=float(np.asarray(self.schedule(step - 1))),
            grad_norm=float(found["grad_norm"]),
            tokens_per_s=useful,
            loss_tokens=int(found["loss_tokens"]),
            step_s=took.step_s,
            padded_tokens_per_s=padded,
            **{f"loss_{scope}": mean for scope, mean in by_scope.items()},
            mfu=useful * job.flops_per_token / job.peak_flops if known else None,  # type: ignore[operator]
            compute_s=took.compute_s,
            input_s=input_s,
            checkpoint_s=checkpoint_s,
            skipped=not found["applied"],
            **(
                {"eval_loss": evaluated.loss} | {f"eval_loss_{scope}": mean for scope, mean in evaluated.by_scope.items()}
                if evaluated
                else {}
            ),
        )

    def _say_layout(self) -> None:
        found = layout_of(self.model, self.optimizer)
        parts = ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in found.parts())
        share = found.trained_parameters / (found.base_parameters + (found.trained_parameters if self._lora_enabled else 0))
        if self._lora_enabled:
            paths = state_paths(nnx.state(self.model, nnx.LoRAParam))
            self._note(target_table(read_text_config(self.job.model), self.job.lora, paths).describe())
        self._note(f"{found.trained_parameters:,} parameters are trained ({share:.2%} of the model); on a device: {parts}")
        data, t = read_manifest(self.job.data), self.job.train
        epochs = t.steps * t.batch_size / max(1, data.sequences - t.eval_batches * t.batch_size)
        self._note(
            f"{t.steps:,} steps of {t.batch_size} rows of up to {data.seq_len:,} tokens; the data's {data.sequences:,} rows "
            f"({data.tokens:,} tokens, {data.loss_tokens:,} bear loss) come {epochs:.2g} times"
        )
        if (reached := warmup_steps(t)) < t.warmup_steps:
            self._note(f"train.warmup_steps = {t.warmup_steps:,} is shortened to {reached:,}, for train.steps = {t.steps:,}")

    def _note(self, text: str) -> None:
        if jax.process_index() == 0:
            self.report({"note": text})

    def close(self) -> None:
        """As upstream; ends the clock's thread too."""
        super().close()
        self.clock.close()


def _first(values: Any) -> Any:
    return values[0]


def _profiler(job: TrainJob, step: int) -> Profiler:
    """Traces `train.profile_steps` steps of this start, when so many come."""
    t = job.train
    wanted = t.profile_steps and step + t.profile_after < t.steps
    options = ProfilerOptions(str(job.out / "profile"), t.profile_after, t.profile_steps)
    return Profiler(initial_step=step, max_step=t.steps, profiler_options=options if wanted else None)


class _NextBatch(hooks.DataHooks):
    """Feeds the trainer from its own iterator, so that a resume does not read and skip."""

    def load_next_train_batch(self, train_ctx: Any) -> Any:
        return train_ctx.next_batch()

    def load_next_eval_batch(self, train_ctx: Any) -> Any:
        return None

"""The GPU twin of the JAX trainer: TRL's SFTTrainer with PEFT and FSDP on the same rows, run by every process.

Transformers' Trainer does the stepping and TRL the loss, which meets the output table in tiles as ours does. `TwinTrainer` changes what
would make the two curves incomparable: it reads our batches, divides by the loss tokens of the whole batch, decays every adapter
parameter, follows our schedule, and keeps our checkpoints and metrics.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from datasets import Dataset
from peft import PeftModel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl.trainer.sft_trainer import SFTTrainer

from gemma_ray.errors import StageError
from gemma_ray.training.claim import Claim
from gemma_ray.training.metrics import MetricsFile, StepMetrics, read_metrics
from gemma_ray.training.torch_arguments import adamw, learning_rate, sft_arguments
from gemma_ray.training.torch_checkpoints import Resume, newest_whole, restore_optimizer, restore_random, save
from gemma_ray.training.torch_data import RankBatches
from gemma_ray.training.torch_job import TorchJob, TorchResult, check_torch
from gemma_ray.training.torch_model import build_adapted, load_adapter, load_base, trained

Report = Callable[[dict[str, Any]], None]


def train_torch(job: TorchJob, report: Report) -> TorchResult:
    """Train to `job.train.steps`, from the newest whole checkpoint when there is one; every process calls it with the same job.

    The processes are those of torch.distributed's default group; without one it is this process alone. `report` is called on rank 0 with
    a dictionary a step, and with a `note` for every damaged checkpoint. Raises RecipeError for what this engine cannot do, CheckpointError
    as `newest_whole` does, StageError when the loss is not finite.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    check_torch(job.train, job.mesh, ranks)
    claim = Claim(job.out) if rank == 0 else None
    resume = _agreed(rank, ranks, lambda: newest_whole(job.checkpoints, job.made_from, job.train.steps))
    for damage in resume.damaged if rank == 0 else ():
        report({"note": f"{damage}; going on from step {resume.step}"})
    if resume.step == job.train.steps:
        return TorchResult(resume.step, _last_loss(job), resume.step)
    arguments = sft_arguments(job, ranks)
    model = build_adapted(load_base(job.model, job.dtype, one_rank_reads=ranks > 1), job.lora, job.train.seed)
    adapter = resume.folder or job.initial_adapter
    if adapter:
        load_adapter(model, adapter)
    trainer = TwinTrainer(model, job, arguments, RankBatches(job, rank, ranks), resume, claim, report)
    trainer.train()
    return TorchResult(trainer.state.global_step, trainer.last_loss, resume.step)


def _agreed(rank: int, ranks: int, find: Callable[[], Resume]) -> Resume:
    """What rank 0 finds, or raises, on every rank."""
    outcome: list[Any] = [None]
    if rank == 0:
        try:
            outcome = [find()]
        except Exception as e:
            outcome = [e]
    if ranks > 1:
        dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _last_loss(job: TorchJob) -> float:
    before = read_metrics(job.metrics)
    return before[-1].loss if before else math.nan


def _as_they_are(rows: list[Any]) -> dict[str, Any]:
    """TRL's collator would pad rows; ours come as whole micro-batches, and this is not called."""
    return rows[0]


class TwinTrainer(SFTTrainer):
    """SFTTrainer on a rank's batches, with the JAX trainer's optimizer, schedule, metrics and rules for checkpoints."""

    def __init__(
        self, model: PeftModel, job: TorchJob, arguments: Any, batches: RankBatches, resume: Resume, claim: Claim | None, report: Report
    ):
        self.job, self.batches, self.resume, self.report = job, batches, resume, report
        self.ranks, self.rank = arguments.world_size, arguments.process_index
        super().__init__(
            model=model,
            args=arguments,
            # TRL looks at a data set's columns and trains on `get_train_dataloader`.
            train_dataset=Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]}),
            data_collator=_as_they_are,
            processing_class=AutoTokenizer.from_pretrained(job.model),
        )
        self.remove_callback(PrinterCallback)
        self.add_callback(_Begin(self))
        self.counts = [0, 0]
        self.step_started = 0.0
        self.last_loss = _last_loss(job) if resume.step else math.nan
        self.metrics_file = MetricsFile(job.metrics, resume.step, claim) if claim else None

    def create_accelerator_and_postprocess(self) -> None:
        """Shard over gloo as well: accelerate applies FSDP on accelerators only, although PyTorch's works on CPU."""
        super().create_accelerator_and_postprocess()
        plugin: Any = self.args.fsdp_plugin_args
        if plugin is not None and not self.is_fsdp_enabled:
            state = self.accelerator.state
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**plugin)
            state.distributed_type = DistributedType.FSDP
            self.is_fsdp_enabled = True

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The rank's micro-batches, from the checkpoint's place on."""
        if self.resume.folder:
            self.batches.set_state(self.resume.data)
        # A loader draws a number when its iteration starts: from a generator of its own, or a resumed run's dropout would differ.
        return DataLoader(self.batches, batch_size=None, generator=torch.Generator())

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW on the adapter."""
        self.optimizer = adamw(list(trained(model or self.model).values()), self.job.train)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        """Our schedule as a factor of the peak, from the step that is resumed from."""
        train, done = self.job.train, self.resume.step
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: learning_rate(train, done + step) / train.learning_rate)
        return self.lr_scheduler

    def begin(self) -> None:
        """Called when model and optimizer are sharded, before the first step: go on where the checkpoint was taken."""
        torch.manual_seed(self.job.train.seed + self.rank)  # every rank drops others
        if self.resume.folder:
            restore_optimizer(self.resume.folder, self.resume.step, self.model, self.optimizer)
            restore_random(self.resume.folder, self.rank)
        self.state.global_step = self._globalstep_last_logged = self.resume.step

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """A step's micro-batches, and the loss tokens of the whole batch on all ranks, by which the sum of its losses is divided."""
        self.step_started = time.perf_counter()
        parts = [next(epoch_iterator) for _ in range(num_batches)]
        tokens = sum(part.pop("tokens") for part in parts)
        counts = torch.tensor([sum(int((part["labels"] >= 0).sum()) for part in parts), tokens], device=device)
        if self.ranks > 1:
            dist.all_reduce(counts)
        self.counts = counts.tolist()
        return parts, counts[0].clamp(min=1)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Called after every step, and with a summary at the end; a step is a line of metrics.jsonl and a report."""
        if "loss" in logs:
            self._record(self.state.global_step, logs)
        super().log(logs, start_time)

    def _record(self, step: int, logs: dict[str, float]) -> None:
        self.last_loss = logs["loss"]
        if not math.isfinite(self.last_loss):
            raise StageError(f"the loss is {self.last_loss} at step {step}; lower train.learning_rate or set train.clip_norm")
        if self.metrics_file is None:
            return
        loss_tokens, tokens = self.counts
        step_s = time.perf_counter() - self.step_started
        metrics = StepMetrics(
            step=step,
            loss=self.last_loss,
            learning_rate=logs["learning_rate"],
            grad_norm=float(logs["grad_norm"]),
            tokens_per_s=tokens / step_s,
            loss_tokens=loss_tokens,
            step_s=step_s,
        )
        self.metrics_file.append(metrics)
        self.report({"step": step, "steps": self.job.train.steps, "loss": metrics.loss, "tokens_per_s": metrics.tokens_per_s})

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Ours in place of Transformers': see `torch_checkpoints`."""
        job = self.job
        state = {"step": self.state.global_step, "data": self.batches.get_state(), "made_from": job.made_from}
        adapted = self.accelerator.unwrap_model(self.model)
        save(job.checkpoints, adapted, self.optimizer, state, self.ranks, job.train.keep_checkpoints)


class _Begin(TrainerCallback):
    def __init__(self, trainer: TwinTrainer):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.begin()

"""The recipe's `train` section as TRL's arguments, and how the model lies on several GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from trl.trainer.sft_config import SFTConfig

from gemma_ray.training.config import TrainConfig
from gemma_ray.training.optimizer import learning_rate_schedule
from gemma_ray.training.torch_job import TorchJob

FSDP: dict[str, Any] = {
    # PyTorch's FSDP2 through accelerate: parameters keep their names and dtypes, so fp32 adapters lie beside bf16 weights.
    "version": 2,
    # ZeRO-3: a layer's weights are whole only while it computes. 31B in bf16 is 62 GB, 31 GB a GPU on two.
    "reshard_after_forward": True,
    # One unit a decoder layer, and one of the embedding, which is the output table too, with the last norm.
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["Gemma4TextDecoderLayer"],
    # The files are read by one rank and sent to the others.
    "cpu_ram_efficient_loading": True,
}
# What is gathered and computed is bf16; gradients are summed over the ranks in the adapters' fp32.
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of the update that follows `step` others, by the JAX trainer's schedule."""
    return float(np.asarray(learning_rate_schedule(config)(step)))


def adamw(parameters: list[torch.nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """optax.adamw's numbers: decoupled decay of every adapter parameter."""
    return torch.optim.AdamW(parameters, lr=config.learning_rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=config.weight_decay)


def sft_arguments(job: TorchJob, ranks: int) -> SFTConfig:
    """TRL's arguments for the job. With more than one rank the model is sharded, and layers are computed again by FSDP's own wrapper."""
    train, on_cpu, sharded = job.train, not torch.cuda.is_available(), ranks > 1
    again = train.remat == "layer"
    arguments = SFTConfig(
        output_dir=str(job.checkpoints),
        max_steps=train.steps,
        per_device_train_batch_size=train.batch_size // (ranks * train.micro_batches),
        gradient_accumulation_steps=train.micro_batches,
        learning_rate=train.learning_rate,
        max_grad_norm=train.clip_norm or 0.0,
        bf16=job.dtype == "bfloat16",
        gradient_checkpointing=again and not sharded,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        fsdp=sharded or None,  # type: ignore[arg-type]  # a flag since Transformers 5, typed as the list it was
        fsdp_config={**FSDP, "activation_checkpointing": again} if sharded else None,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and sharded else None,
        ddp_find_unused_parameters=False,
        seed=train.seed,
        # Rows come as they are: packed, tokenised and labelled.
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        remove_unused_columns=False,
        save_strategy="steps",
        save_steps=train.checkpoint_every,
        logging_steps=1,
        logging_nan_inf_filter=False,  # a loss that is not finite ends the run
        report_to="none",
        disable_tqdm=True,
    )
    plugin: Any = arguments.fsdp_plugin_args
    if plugin and arguments.bf16:
        plugin["mixed_precision_policy"] = BF16
    return arguments

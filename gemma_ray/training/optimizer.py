"""The optimizers and the schedules, a row each. To train with another one, add a row, and its name in `TrainConfig`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gemma_ray.training.config import TrainConfig

if TYPE_CHECKING:
    import optax


def _adamw(schedule: optax.Schedule, config: TrainConfig) -> optax.GradientTransformation:
    import optax

    return optax.adamw(schedule, weight_decay=config.weight_decay)


def _sgd(schedule: optax.Schedule, config: TrainConfig) -> optax.GradientTransformation:
    import optax

    return optax.chain(optax.add_decayed_weights(config.weight_decay), optax.sgd(schedule))


OPTIMIZERS: dict[str, Callable[[optax.Schedule, TrainConfig], optax.GradientTransformation]] = {
    "adamw": _adamw,  # b1 0.9, b2 0.999, eps 1e-8: Optax's defaults and PyTorch's
    "sgd": _sgd,  # without momentum
}


def warmup_steps(config: TrainConfig) -> int:
    """`train.warmup_steps`, or as many of them as leave a step at the peak."""
    return min(config.warmup_steps, config.steps - 1)


def learning_rate_schedule(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up from 0 to the peak, then what `config.schedule` says to `decay_steps`."""
    import optax

    end = config.decay_steps or config.steps
    warmup = warmup_steps(config)
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, end)
    last = 0.0 if config.schedule == "linear" else config.learning_rate
    parts = [optax.linear_schedule(0.0, config.learning_rate, warmup), optax.linear_schedule(config.learning_rate, last, end - warmup)]
    return optax.join_schedules(parts, [warmup])


def build_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """The optimizer on the schedule, with the global gradient norm clipped when `clip_norm` is set."""
    import optax

    optimizer = OPTIMIZERS[config.optimizer](learning_rate_schedule(config), config)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer) if config.clip_norm else optimizer

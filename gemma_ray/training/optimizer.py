"""The optimizer and its schedule. To train with another one, change this file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemma_ray.training.config import TrainConfig

if TYPE_CHECKING:
    import optax


def learning_rate_schedule(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up from 0 to the peak, then cosine to 0 at the last step."""
    import optax

    warmup = min(config.warmup_steps, config.steps - 1)
    return optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, config.steps)


def build_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW on the schedule, with the global gradient norm clipped when `clip_norm` is set."""
    import optax

    adamw = optax.adamw(learning_rate_schedule(config), weight_decay=config.weight_decay)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw) if config.clip_norm else adamw

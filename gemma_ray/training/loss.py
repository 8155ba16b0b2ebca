"""The training loss: next-token cross-entropy, averaged over the tokens that bear loss in the whole global batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax
    from flax import nnx


def next_token_loss(model: nnx.Module, tokens: jax.Array, loss_mask: jax.Array, valid: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy in nats, and the counts it is a mean over.

    tokens [batch, length] int32; loss_mask [batch, length] bool, true where predicting that token is trained; valid [batch, length] bool,
    false on padding. Returns (loss, {"loss_tokens", "tokens"}), scalars.
    """
    import jax.numpy as jnp
    import optax

    length = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    attention_mask = jnp.tril(jnp.ones((length, length), bool))[None] & valid[:, None, :]  # [batch, query, key]
    logits, _ = model(tokens, positions, None, attention_mask)  # type: ignore[operator]  # [batch, length, vocab] float32
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    bears_loss = loss_mask[:, 1:]
    loss_tokens = bears_loss.sum()
    loss = jnp.where(bears_loss, losses, 0.0).sum() / jnp.maximum(loss_tokens, 1)
    return loss, {"loss_tokens": loss_tokens, "tokens": valid.sum()}


def model_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `next_token_loss` from a batch of the data source."""
    return {"tokens": batch["tokens"], "loss_mask": batch["loss_mask"], "valid": batch["valid"]}

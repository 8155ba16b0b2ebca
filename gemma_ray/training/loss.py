"""The training loss: next-token cross-entropy over the tokens that bear loss, without ever holding the logits of a whole batch.

A token of Gemma 4 has 262,144 logits: 4 × 4,096 tokens would be 17 GB in fp32. So hidden states meet the output table a chunk of
positions at a time, and the gradient is worked out in the same pass, where the chunk's logits are at hand, instead of computing them again.

Every token is predicted anyway, so the same pass gives the loss in each scope (`gemma_ray.models.templates.SCOPES`): curves of runs that
were trained in different scopes can be compared.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gemma_ray.models.placing import constrained
from gemma_ray.models.templates import SCOPES

CHUNK = 512
"""Positions of a row that meet the output table at once."""


def targets_and_weights(tokens: jax.Array, loss_mask: jax.Array, segments: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What each position predicts, int32, and whether that bears loss, float32; both [batch, length].

    The next token, unless it is another document's or there is none.
    """
    same_document = segments == jnp.roll(segments, -1, 1)
    bears_loss = jnp.roll(loss_mask, -1, 1) & same_document
    return jnp.roll(tokens, -1, 1), bears_loss.at[:, -1].set(False).astype(jnp.float32)


def predicted_scopes(scopes: jax.Array, segments: jax.Array) -> jax.Array:
    """The place in `SCOPES` of what each position predicts, int8 [batch, length]; -1 where that is another document's or nothing."""
    inside = (segments == jnp.roll(segments, -1, 1)) & (segments > 0)
    return jnp.where(inside, jnp.roll(scopes, -1, 1), -1).at[:, -1].set(-1)


def scope_counts(scopes: jax.Array, segments: jax.Array) -> jax.Array:
    """How many predictions of a batch are of each scope, int32 [3]; wider scopes hold the narrower."""
    return _by_scope(jnp.ones(scopes.shape, jnp.int32), predicted_scopes(scopes, segments))


def _by_scope(values: jax.Array, scopes: jax.Array) -> jax.Array:
    return jnp.stack([jnp.where(scopes >= i, values, 0).sum() for i in range(len(SCOPES))])


def next_token_loss(
    model: Any, tokens: jax.Array, loss_mask: jax.Array, scopes: jax.Array, positions: jax.Array, segments: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The sum of the cross-entropies in nats over a batch of rows [batch, length]: a scalar, and [3] by scope, which has no derivative.

    loss_mask is true where predicting that token is trained. Divide by the number of such predictions (`scope_counts`) for the mean.
    """
    targets, weights = targets_and_weights(tokens, loss_mask, segments)
    hidden = model.hidden_states(tokens, positions, segments)
    # Gathered over fsdp once, before the loop over chunks, where XLA would gather it for every chunk.
    table = constrained(model.embedder.input_embedding.get_value().astype(hidden.dtype), PartitionSpec("tp", None))
    return summed_cross_entropy(hidden, table, targets, weights, predicted_scopes(scopes, segments), model.config.final_logit_softcap)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def summed_cross_entropy(
    hidden: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array, scopes: jax.Array, softcap: float | None
) -> tuple[jax.Array, jax.Array]:
    """Σ weights · −log softmax(softcap · tanh(hidden · tableᵀ / softcap))[targets] in fp32, and [3] the same by scope without weights.

    hidden [batch, length, embed], table [vocab, embed], targets, weights and scopes [batch, length]. Derivatives of the first are for
    hidden and table.
    """
    return _forward(hidden, table, targets, weights, scopes, softcap, table_gradient=False, hidden_gradient=False)[0]


def _forward(
    hidden: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    scopes: jax.Array,
    softcap: float | None,
    *,
    hidden_gradient: bool,
    table_gradient: bool,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array | None, jax.Array | None]:
    """The sums, and the first one's gradients where they are wanted."""

    def chunk(carry: Any, rows: Any) -> Any:
        total, by_scope, into_table = carry
        h, target, weight, scope = rows
        logits = jnp.einsum("btd,vd->btv", h, table, preferred_element_type=jnp.float32)
        capped = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
        log_sum = jax.nn.logsumexp(capped, axis=-1)
        is_target = jax.lax.broadcasted_iota(jnp.int32, capped.shape, 2) == target[..., None]
        at_target = jnp.where(is_target, capped, 0.0).sum(-1)
        total += (weight * (log_sum - at_target)).sum()
        by_scope += _by_scope(log_sum - at_target, scope)
        if not hidden_gradient and not table_gradient:
            return (total, by_scope, into_table), None
        slope = (jnp.exp(capped - log_sum[..., None]) - is_target) * weight[..., None]
        if softcap is not None:
            slope *= 1.0 - jnp.square(capped / softcap)
        slope = slope.astype(hidden.dtype)
        if table_gradient:
            into_table += jnp.einsum("btv,btd->vd", slope, h, preferred_element_type=jnp.float32)
        return (total, by_scope, into_table), jnp.einsum("btv,vd->btd", slope, table)

    chunks = [_in_chunks(x) for x in (hidden, targets, weights, scopes)]
    start = (jnp.zeros(()), jnp.zeros(len(SCOPES)), jnp.zeros(table.shape, jnp.float32) if table_gradient else None)
    (total, by_scope, into_table), into_hidden = jax.lax.scan(chunk, start, tuple(chunks))
    return (total, by_scope), None if into_hidden is None else into_hidden.swapaxes(0, 1).reshape(hidden.shape), into_table


def _in_chunks(x: jax.Array) -> jax.Array:
    """[batch, length, …] → [chunks, batch, chunk, …], in the largest even chunks of at most CHUNK."""
    batch, length = x.shape[:2]
    count = next(n for n in range(-(-length // CHUNK), length + 1) if length % n == 0)
    return x.reshape(batch, count, length // count, *x.shape[2:]).swapaxes(0, 1)


def _with_gradients(hidden: Any, table: Any, targets: Any, weights: Any, scopes: Any, softcap: float | None) -> Any:
    wanted = {"hidden_gradient": hidden.perturbed, "table_gradient": table.perturbed}
    values = (hidden.value, table.value, targets.value, weights.value, scopes.value)
    sums, into_hidden, into_table = _forward(*values, softcap, **wanted)
    return sums, (into_hidden, into_table)


def _scaled(softcap: float | None, gradients: Any, upstream: Any) -> Any:
    into_hidden, into_table = (g if g is None else (g * upstream[0]).astype(g.dtype) for g in gradients)
    return into_hidden, into_table, None, None, None


summed_cross_entropy.defvjp(_with_gradients, _scaled, symbolic_zeros=True)

"""One optimizer step, as the trainer runs it and as the planner compiles it.

    micro-batches → Σ loss and its gradient, weighted by loss tokens → is it finite, and no spike? → one optimizer update

Only what changes goes in and comes out by donation; base weights go in alone. Trained parameters of an adapter are fp32 whatever the model
computes in: at a rate of 1e-4 AdamW's updates vanish in bfloat16's eight bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from gemma_ray.training.dropout import dropout_key
from gemma_ray.training.loss import next_token_loss, scope_counts, targets_and_weights
from gemma_ray.training.xla_options import xla_options

Batch = dict[str, Any]
"""`tokens`, `loss_mask`, `scopes`, `positions` and `segments`, each [batch, length]; segment 0 is padding."""
Outcome = tuple[jax.Array, dict[str, jax.Array], jax.Array]
"""Mean loss in nats; counts and sums (`counts_of`) and whether the update was made (`applied`); norm of the gradient."""
NO_LIMIT = np.float32(np.inf)


class Step:
    """The compiled step of a model and its optimizer."""

    def __init__(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        micro_batches: int = 1,
        device_kind: str = "cpu",
        dropout_seed: int | None = None,
    ):
        """`micro_batches` splits a batch into as many parts that go one after another, with the same result and less memory.

        `device_kind` is JAX's name of the mesh's devices, for XLA's options; `dropout_seed` is for an adapter with dropout.
        """
        self.whole, self.micro_batches, self.dropout_seed = (model, optimizer), micro_batches, dropout_seed
        self.limit = NO_LIMIT
        """A higher loss is a spike, and makes no update."""
        self.changes = nnx.Any(optimizer.wrt, nnx.OptState)
        self.graph, changing, self.frozen = nnx.split(self.whole, self.changes, ...)
        shardings = (jax.tree.map(lambda leaf: leaf.sharding, changing), None)
        options = xla_options(device_kind)
        self.jitted_fn = jax.jit(self._run, donate_argnums=0, out_shardings=shardings, compiler_options=options)
        self._evaluate = jax.jit(self._run_eval, compiler_options=options)

    def __call__(self, batch: Batch) -> Outcome:
        """Update model and optimizer on one global batch."""
        changed, outcome = self.jitted_fn(nnx.state(self.whole, self.changes), self.frozen, batch, self.limit)
        nnx.update(self.whole, changed)
        return outcome

    def evaluate(self, batch: Batch) -> dict[str, jax.Array]:
        """`counts_of` a batch and its losses' sums, without an update and without dropout."""
        return self._evaluate(nnx.state(self.whole, self.changes), self.frozen, batch)

    def lower(self, batch: Batch) -> Any:
        """The step for arguments of this shape and sharding, not yet compiled; model, optimizer and batch may be abstract."""
        return self.jitted_fn.lower(nnx.state(self.whole, self.changes), self.frozen, batch, self.limit)

    def _run(self, changing: Any, frozen: Any, batch: Batch, limit: Any) -> tuple[Any, Outcome]:
        model, optimizer = nnx.merge(self.graph, changing, frozen)
        outcome = train_step(model, optimizer, batch, self.micro_batches, limit=limit, dropout_seed=self.dropout_seed)
        return nnx.state((model, optimizer), self.changes), outcome

    def _run_eval(self, changing: Any, frozen: Any, batch: Batch) -> dict[str, jax.Array]:
        model, _ = nnx.merge(self.graph, changing, frozen)
        total, by_scope = _over_parts(lambda rows, _: next_token_loss(model, **rows), batch, self.micro_batches)
        return {**counts_of(batch), "loss": total, "by_scope": by_scope}


def counts_of(batch: Batch) -> dict[str, jax.Array]:
    """Tokens of a batch without and with padding, loss tokens, and predictions by scope [3]."""
    return {
        "tokens": (batch["segments"] > 0).sum(),
        "padded_tokens": jnp.asarray(batch["segments"].size),
        "loss_tokens": _loss_tokens(batch).astype(jnp.int32),
        "scope_tokens": scope_counts(batch["scopes"], batch["segments"]),
    }


def train_step(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    batch: Batch,
    micro_batches: int = 1,
    *,
    limit: Any = NO_LIMIT,
    dropout_seed: int | None = None,
) -> Outcome:
    """Update the optimizer's parameters of `model` on one global batch, unless its loss is not finite or above `limit`."""
    graph, trained, frozen = nnx.split(model, optimizer.wrt, ...)
    compute = model.config.dtype  # type: ignore[attr-defined]
    scale = 1.0 / jnp.maximum(_loss_tokens(batch), 1.0)
    key = None if dropout_seed is None else jax.random.fold_in(jax.random.key(dropout_seed), optimizer.step.get_value())

    def loss(trained: Any, rows: Batch, part: Any) -> tuple[jax.Array, jax.Array]:
        in_compute_dtype = jax.tree.map(lambda x: x.astype(compute), trained)
        with dropout_key(None if key is None else jax.random.fold_in(key, part)):
            total, by_scope = next_token_loss(nnx.merge(graph, in_compute_dtype, frozen), **rows)
        return total * scale, by_scope

    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    (value, by_scope), gradients = _over_parts(lambda rows, part: value_and_grad(trained, rows, part), batch, micro_batches)
    norm = optax.global_norm(gradients)
    applied = jnp.isfinite(norm) & (value <= limit)
    _update(model, optimizer, gradients, applied)
    return value, {**counts_of(batch), "by_scope": by_scope, "applied": applied}, norm


def _update(model: nnx.Module, optimizer: nnx.Optimizer, gradients: Any, applied: jax.Array) -> None:
    """An optimizer update where `applied`; otherwise only counters of steps go on, so that the schedule keeps to the step."""
    changes = nnx.Any(optimizer.wrt, nnx.OptState)
    before = nnx.state((model, optimizer), changes)
    optimizer.update(model, gradients)
    after = nnx.state((model, optimizer), changes)
    chosen = jax.tree.map(lambda new, old: jnp.where(applied, new, old) if jnp.issubdtype(new.dtype, jnp.inexact) else new, after, before)
    nnx.update((model, optimizer), chosen)


def _loss_tokens(batch: Batch) -> jax.Array:
    return targets_and_weights(batch["tokens"], batch["loss_mask"], batch["segments"])[1].sum()


def _over_parts(work: Callable[[Batch, Any], Any], batch: Batch, count: int) -> Any:
    """The sum of `work(rows, number)` over a batch in `count` parts, one after another."""
    if count == 1:
        return work(batch, 0)
    parts = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), batch)
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(work, jax.tree.map(lambda x: x[0], parts), 0))
    numbered = (parts, jnp.arange(count))
    return jax.lax.scan(lambda so_far, part: (jax.tree.map(jnp.add, so_far, work(*part)), None), start, numbered)[0]

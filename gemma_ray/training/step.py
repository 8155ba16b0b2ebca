"""One optimizer step, as the trainer runs it and as the planner compiles it.

    micro-batches → Σ loss and its gradient, weighted by loss tokens → one optimizer update

Only what changes goes in and comes out by donation; base weights go in alone. Trained parameters of an adapter are fp32 whatever the model
computes in: at a rate of 1e-4 AdamW's updates vanish in bfloat16's eight bits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from gemma_ray.training.loss import next_token_loss, targets_and_weights
from gemma_ray.training.xla_options import xla_options

Batch = dict[str, Any]
"""`tokens`, `loss_mask`, `positions` and `segments`, each [batch, length]; segment 0 is padding."""
Outcome = tuple[jax.Array, dict[str, jax.Array], jax.Array]
"""Mean loss in nats, counts of tokens and loss tokens, norm of the gradient."""


class Step:
    """The compiled step of a model and its optimizer."""

    def __init__(self, model: nnx.Module, optimizer: nnx.Optimizer, micro_batches: int = 1, device_kind: str = "cpu"):
        """`micro_batches` splits a batch into as many parts that go one after another, with the same result and less memory.

        `device_kind` is JAX's name of the mesh's devices, for XLA's options.
        """
        self.whole, self.micro_batches = (model, optimizer), micro_batches
        self.changes = nnx.Any(optimizer.wrt, nnx.OptState)
        self.graph, changing, self.frozen = nnx.split(self.whole, self.changes, ...)
        shardings = (jax.tree.map(lambda leaf: leaf.sharding, changing), None)
        self.jitted_fn = jax.jit(self._run, donate_argnums=0, out_shardings=shardings, compiler_options=xla_options(device_kind))

    def __call__(self, batch: Batch) -> Outcome:
        """Update model and optimizer on one global batch."""
        changed, outcome = self.jitted_fn(nnx.state(self.whole, self.changes), self.frozen, batch)
        nnx.update(self.whole, changed)
        return outcome

    def lower(self, batch: Batch) -> Any:
        """The step for arguments of this shape and sharding, not yet compiled; model, optimizer and batch may be abstract."""
        return self.jitted_fn.lower(nnx.state(self.whole, self.changes), self.frozen, batch)

    def _run(self, changing: Any, frozen: Any, batch: Batch) -> tuple[Any, Outcome]:
        model, optimizer = nnx.merge(self.graph, changing, frozen)
        outcome = train_step(model, optimizer, batch, self.micro_batches)
        return nnx.state((model, optimizer), self.changes), outcome


def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Batch, micro_batches: int = 1) -> Outcome:
    """Update the optimizer's parameters of `model` on one global batch."""
    graph, trained, frozen = nnx.split(model, optimizer.wrt, ...)
    compute = model.config.dtype  # type: ignore[attr-defined]
    loss_tokens = targets_and_weights(batch["tokens"], batch["loss_mask"], batch["segments"])[1].sum()
    scale = 1.0 / jnp.maximum(loss_tokens, 1.0)

    def loss(trained: Any, rows: Batch) -> jax.Array:
        in_compute_dtype = jax.tree.map(lambda x: x.astype(compute), trained)
        return next_token_loss(nnx.merge(graph, in_compute_dtype, frozen), **rows) * scale

    value_and_grad = jax.value_and_grad(loss)
    if micro_batches == 1:
        value, gradients = value_and_grad(trained, batch)
    else:
        parts = jax.tree.map(lambda x: x.reshape(-1, micro_batches, *x.shape[1:]).swapaxes(0, 1), batch)
        start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, trained))
        (value, gradients), _ = jax.lax.scan(lambda so_far, rows: (_sum(so_far, value_and_grad(trained, rows)), None), start, parts)
    norm = optax.global_norm(gradients)
    optimizer.update(model, gradients)
    return value, {"loss_tokens": loss_tokens.astype(jnp.int32), "tokens": (batch["segments"] > 0).sum()}, norm


def _sum(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)

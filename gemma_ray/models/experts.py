"""The mixture of experts of 26B-A4B, which chooses as the model was trained to and runs on a sharded mesh.

    hidden ──┬─ router (norm · scale · weights) ─ top k ─ their weights, which sum to one, times a scale of the expert
             └─ norm ─ rows in the experts' order ─ ragged products: gate and up, down ─ rows in their own order ─ weighted sum

Tunix's parameters and names are kept. What differs from `MoERagged` (google/tunix, models/gemma4/moe.py as of 0.1.7):

- The router sees hidden states as they are, as in transformers (Gemma4TextDecoderLayer) and vLLM. Tunix gives it what the experts' norm has
  scaled, which chooses other experts wherever that norm's scales are not all alike.
- The best experts are exact; Tunix asks for them with `approx_max_k`, which on a TPU may leave some out.
- On a mesh each device sorts the rows it has and meets all experts, `tp` of them sharing an expert's hidden dimension. Sorting the rows
  of all devices, as XLA would, gathers them everywhere.

`tests/models/test_experts.py` fails when upstream's router changes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name as named
from jax.sharding import PartitionSpec
from tunix.models.gemma4 import moe

from gemma_ray.models.axes import ROWS_OVER
from gemma_ray.models.placing import current_mesh

GATE_UP, OUTPUT = "experts_gate_up", "experts"
"""Names under which a rematerialisation policy may keep what the experts' products made."""


class Experts(moe.MoERagged):
    """Tunix's parameters; called with what the router sees as well."""

    def __call__(self, x: jax.Array, router_input: jax.Array) -> jax.Array:  # type: ignore[override]
        """The chosen experts' weighted sum [batch, length, embed] of x, alike. `router_input` is x before its norm."""
        choices, weights = self.route(router_input)
        dtype = self.config.dtype
        gate_up, down = self.gating_einsum.get_value().astype(dtype), self.linear.get_value().astype(dtype)
        mesh = current_mesh()
        shares = 1 if mesh.empty else mesh.shape["data"] * mesh.shape["fsdp"]
        if mesh.empty or mesh.size == 1 or x.shape[0] % shares:  # the last: Qwix's look at the model with two rows
            return _mixed(x, choices, weights, gate_up, down)

        def on_device(*arrays: jax.Array) -> jax.Array:
            return jax.lax.psum(_mixed(*arrays), "tp")

        rows = PartitionSpec(ROWS_OVER, None, None)
        specs = (rows, rows, rows, PartitionSpec(None, None, "tp", None), PartitionSpec(None, "tp", None))
        sharded: Any = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
        return sharded(x, choices, weights, gate_up, down)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The experts that each position goes to and their weights, both [batch, length, k]. x [batch, length, embed] is not normed."""
        wide = x.astype(jnp.float32)
        unit = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
        scaled = unit * self.router_scale.get_value().astype(jnp.float32) * self.features**-0.5
        scores = scaled @ self.router_logits.get_value().astype(jnp.float32)
        best, choices = jax.lax.top_k(scores, self.num_experts_per_datapoint)
        return choices, jax.nn.softmax(best, axis=-1) * self.per_expert_scale.get_value().astype(jnp.float32)[choices]


def _mixed(x: jax.Array, choices: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """Σ weights · expert(x) over choices. x [b, t, d]; choices, weights [b, t, k]; gate_up [e, 2, x, d], down [e, x, d], of which x may be
    a share: the result is then a summand."""
    experts, _, hidden, embed = gate_up.shape
    chosen = choices.reshape(-1)
    order = jnp.argsort(chosen)  # stable
    counts = jnp.bincount(chosen, length=experts).astype(jnp.int32)
    rows = x.reshape(-1, embed)[order // choices.shape[-1]]
    into = gate_up.reshape(experts, 2 * hidden, embed).swapaxes(1, 2)
    both = named(jax.lax.ragged_dot(rows, into, counts), GATE_UP)
    product = nnx.gelu(both[:, :hidden]) * both[:, hidden:]
    out = named(jax.lax.ragged_dot(product, down, counts), OUTPUT)
    back = out[jnp.argsort(order)].reshape(*choices.shape, embed)
    return jnp.einsum("btkd,btk->btd", back, weights, preferred_element_type=jnp.float32).astype(x.dtype)

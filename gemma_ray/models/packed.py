"""Tunix's Gemma 4 as it is trained: rows of several documents, hidden states instead of logits, one remat policy for all layers.

Tunix's modules, parameters and names are kept, so its checkpoints and Qwix's LoRA fit; what differs is one attention core and the loop over
layers. Upstream ignores `segment_ids` ("unused until seq packing lands", google/tunix, models/gemma4/model.py) and always
materialises fp32 logits over the vocabulary.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name as named
from jax.sharding import PartitionSpec
from tunix.models.gemma4 import model as tunix_model

from gemma_ray.models.attention import OUTPUT, Kernel, attend
from gemma_ray.models.axes import ROWS_OVER
from gemma_ray.models.placing import constrained

# What a layer keeps for the backward pass, by remat policy; all else is computed again. Bytes a token in bfloat16 for 31B's sliding layers.
_PRODUCTS = ("query", "key_value", OUTPUT, "attention", "gate", "up", "mlp")  # 16, 16, 16, 11, 43, 43 and 11 kB: what matrix products made
KEPT: dict[str, tuple[str, ...] | None] = {
    "none": None,  # everything
    "norms": (*_PRODUCTS, "normed", "product"),  # and 2 × 11 and 43 kB: norms and rotations again, which cost little
    "elementwise": _PRODUCTS,  # activations again too
    "layer": (),  # a layer's input alone: 11 kB
}


ACTIVATIONS = PartitionSpec(ROWS_OVER, None, None)
"""Hidden states [batch, length, embed] between layers."""


class PackedAttention(tunix_model.Attention):
    """Tunix's projections and norms around `attend`; takes segments where Tunix takes a mask."""

    kernel: Kernel = "dot"
    splash_block: int | None = None

    def block(self, x: Any, segment_pos: Any, cache: Any, attn_mask: Any, kv_shared_cache: Any = None) -> Any:
        """Keeps upstream's signature: no cache, and `attn_mask` holds segments [batch, length]."""
        del cache
        x = named(x, "normed")
        query = self._rotated(self._query_norm(made(named(self.q_einsum(apart(x)), "query"))), segment_pos)
        if kv_shared_cache is not None:
            key, value = kv_shared_cache["k"], kv_shared_cache["v"]
        else:
            kv = self.k_einsum(apart(x)) if hasattr(self, "k_einsum") else self.kv_einsum(apart(x))
            kv = made(named(kv, "key_value"))
            key, value = (kv, kv) if hasattr(self, "k_einsum") else kv
            key, value = self._rotated(self._key_norm(key), segment_pos), _unit_rms(value)
        local = self.attn_type == tunix_model.AttentionType.LOCAL_SLIDING
        window = self.config.sliding_window_size if local else None
        mixed = attend(query, key, value, attn_mask, window=window, kernel=self.kernel, block=self.splash_block)
        return None, apart(named(self.attn_vec_einsum(mixed), "attention")), (key, value)

    def _rotated(self, x: Any, positions: Any) -> Any:
        return tunix_model.apply_rope(
            x,
            positions,
            base_frequency=self.rope_base_frequency,
            scale_factor=self.rope_scale_factor,
            rope_proportion=self.rope_proportion,
        )


class PackedFeedForward(tunix_model.FeedForward):
    """Tunix's gated MLP, its matrix products kept apart from what is between them."""

    def block(self, x: Any) -> Any:
        """x and result [batch, length, embed]."""
        x = named(x, "normed")
        gate, up = made(named(self.gate_proj(apart(x)), "gate")), made(named(self.up_proj(apart(x)), "up"))
        product = taken(named(nnx.gelu(gate) * up, "product"))
        return apart(named(self.down_proj(product), "mlp"))


class PackedEmbedder(tunix_model.Embedder):
    """Tunix's, which leaves the layout of what it makes to `ACTIVATIONS`.

    Upstream's `shard` constrains it to another, and does nothing where JAX's default device is a CPU: the chip would run another program
    than the one that is compiled for it without a chip.
    """

    def encode(self, x: Any) -> jax.Array:
        """Scaled embeddings [batch, length, embed] of tokens [batch, length]."""
        rows = self.input_embedding.get_value()[x]
        return (rows * jnp.sqrt(rows.shape[-1]).astype(rows.dtype)).astype(self.config.dtype)


class PackedGemma4(tunix_model.Gemma4):
    """Gemma 4 on packed rows."""

    remat: str = "none"

    def __init__(self, config: tunix_model.ModelConfig, *, rngs: nnx.Rngs):
        packed = {"Attention": PackedAttention, "FeedForward": PackedFeedForward, "Embedder": PackedEmbedder}
        with mock.patch.multiple(tunix_model, **packed):
            super().__init__(config, rngs=rngs)

    def run_with(self, remat: str, kernel: Kernel, splash_block: int | None = None) -> None:
        """Choose the remat policy and the attention kernel. After LoRA was added: under remat Qwix loses the parameters it adds."""
        self.remat = remat
        for layer in self.layers:
            layer.attn.kernel, layer.attn.splash_block = kernel, splash_block

    def hidden_states(self, tokens: Any, positions: Any, segments: Any) -> jax.Array:
        """The last layer's normalised output [batch, length, embed].

        tokens, positions (restarting with each document) and segments (equal within a document) are int32 [batch, length].
        """
        x = constrained(self.embedder.encode(tokens), ACTIVATIONS)
        by_layer = self.embedder.encode_per_layer_input(x, tokens) if self.config.per_layer_input_dim else None
        block = tunix_model.DecoderLayer.block
        kept_names = KEPT[self.remat]
        if kept_names is not None:
            policy = jax.checkpoint_policies.save_only_these_names(*kept_names)
            block = nnx.remat(block, graph_updates=False, policy=policy)
        kept: dict[int, dict[str, Any]] = {}  # keys and values that later layers share (E2B, E4B)
        for i, layer in enumerate(self.layers):
            origin = self.kv_cache_sharing_patterns[i]
            own_input = None if by_layer is None else by_layer[:, :, i]
            _, x, (key, value) = block(layer, x, positions, None, segments, own_input, kept.get(origin))
            x = constrained(x, ACTIVATIONS)
            if i in self.shared_layer_origins:
                kept[i] = {"k": key, "v": value}
        return self.final_norm(x)

    def __call__(self, tokens: Any, positions: Any, segments: Any) -> jax.Array:  # type: ignore[override]
        """Logits [batch, length, vocab] float32; arguments as of `hidden_states`."""
        logits = self.embedder.decode(self.hidden_states(tokens, positions, segments)).astype(jnp.float32)
        cap = self.config.final_logit_softcap
        return logits if cap is None else jnp.tanh(logits / cap) * cap

    def get_model_input(self) -> dict[str, jax.Array]:
        """A small input, for Qwix to see every operation once."""
        return dict.fromkeys(("tokens", "positions", "segments"), jnp.ones((2, 2), jnp.int32))


# XLA:TPU pulls a norm's reduction or an activation's derivative into the matrix product that takes it and repeats it for every tile, by
# which a product takes up to twice as long as alone; and a norm's reductions slow down the product that makes its input. What a product
# makes may be activated on its way out, which costs next to nothing. docs/planning.md has the figures.


def apart(x: jax.Array) -> jax.Array:
    """x, not to be fused with what makes or takes it, forward and backward."""
    return jax.lax.optimization_barrier(x)


@jax.custom_vjp
def taken(x: jax.Array) -> jax.Array:
    """x, worked out before the matrix product that takes it; its derivative may be worked out in the product that makes that."""
    return jax.lax.optimization_barrier(x)


taken.defvjp(lambda x: (taken(x), None), lambda _, g: (g,))


@jax.custom_vjp
def made(x: jax.Array) -> jax.Array:
    """x, which may be used in the matrix product that makes it; its derivative is worked out before the products that take that."""
    return x


made.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.optimization_barrier(g),))


def _unit_rms(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)

"""Which Tunix parameter is which Hugging Face tensor, and how one becomes the other. Loading, merging and exporting all read this table.

Dimensions: d embed, n query heads, k KV heads, h head_dim, f MLP hidden, v vocabulary, l layers, p per-layer input, e experts, x expert
hidden, r LoRA rank. Hugging Face stores a projection as [out, in]; Tunix keeps heads apart and fuses K and V, where both are there, into
one parameter:

    layout      Hugging Face             Tunix            LoRA A, B                  adapter update in Tunix's layout
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How one or two Hugging Face tensors and one Tunix parameter hold the same numbers."""

    to_tunix: Callable[..., Array]
    """Hugging Face tensors, and the Tunix shape as keyword `shape` → the Tunix parameter."""
    to_hf: Callable[[Array], tuple[Array, ...]]
    """The inverse."""
    lora: str | None = None
    """einsum of LoRA A and B that gives the update in Tunix's layout; None where LoRA does not apply."""


# fmt: off
LAYOUTS: dict[str, Layout] = {
    # as it is: embeddings [v, d], norms [d], layer scalar [1]
    "same": Layout(
        to_tunix=lambda w, shape: w.reshape(shape),
        to_hf=lambda p: (p,),
    ),
    # gate, up [f, d] → [d, f]; down [d, f] → [f, d]            A [in, r], B [r, out]
    "linear": Layout(
        to_tunix=lambda w, shape: w.T,
        to_hf=lambda p: (p.T,),
        lora="ir,ro->io",
    ),
    # q [(n h), d] → [n, d, h]; k of global layers alike          A [d, r], B [r, n, h]
    "heads": Layout(
        to_tunix=lambda w, shape: w.reshape(shape[0], shape[2], shape[1]).swapaxes(1, 2),
        to_hf=lambda p: (p.swapaxes(1, 2).reshape(-1, p.shape[1]),),
        lora="dr,rnh->ndh",
    ),
    # k and v [(k h), d] each → [2, k, d, h]                      A [d, r], B [r, 2, k, h]
    "stacked_heads": Layout(
        to_tunix=lambda k, v, shape: np.stack([w.reshape(shape[1], shape[3], shape[2]).swapaxes(1, 2) for w in (k, v)]),
        to_hf=lambda p: tuple(p[c].swapaxes(1, 2).reshape(-1, p.shape[2]) for c in (0, 1)),
        lora="dr,rckh->ckdh",
    ),
    # o [d, (n h)] → [n, h, d]                                    A [n, h, r], B [r, d]
    "output_heads": Layout(
        to_tunix=lambda w, shape: w.reshape(shape[2], shape[0], shape[1]).transpose(1, 2, 0),
        to_hf=lambda p: (p.transpose(2, 0, 1).reshape(p.shape[2], -1),),
        lora="nhr,rd->nhd",
    ),
    # without an adapter: per-layer input gate and projection, router, [out, in] → [in, out]
    "transposed": Layout(
        to_tunix=lambda w, shape: w.T,
        to_hf=lambda p: (p.T,),
    ),
    # per-layer embeddings [v, (l p)] → [v, l, p]
    "table_by_layer": Layout(
        to_tunix=lambda w, shape: w.reshape(shape),
        to_hf=lambda p: (p.reshape(p.shape[0], -1),),
    ),
    # projection to per-layer inputs [(l p), d] → [d, l, p]
    "output_by_layer": Layout(
        to_tunix=lambda w, shape: w.T.reshape(shape),
        to_hf=lambda p: (p.reshape(p.shape[0], -1).T,),
    ),
    # gate and up of experts [e, (2 x), d] → [e, 2, x, d]
    "experts_in": Layout(
        to_tunix=lambda w, shape: w.reshape(shape),
        to_hf=lambda p: (p.reshape(p.shape[0], -1, p.shape[3]),),
    ),
    # down of experts [e, d, x] → [e, x, d]
    "experts_out": Layout(
        to_tunix=lambda w, shape: w.swapaxes(1, 2),
        to_hf=lambda p: (p.swapaxes(1, 2),),
    ),
}

_K_IS_V = (
    ("attn.q_einsum.w",            ("self_attn.q_proj.weight",),                              "heads"),
    ("attn.k_einsum.w",            ("self_attn.k_proj.weight",),                              "heads"),
    ("attn._key_norm.scale",       ("self_attn.k_norm.weight",),                              "same"),
)
_K_AND_V = (
    ("attn.q_einsum.w",            ("self_attn.q_proj.weight",),                              "heads"),
    ("attn.kv_einsum.w",           ("self_attn.k_proj.weight", "self_attn.v_proj.weight"),    "stacked_heads"),
    ("attn._key_norm.scale",       ("self_attn.k_norm.weight",),                              "same"),
)
_NO_K_NOR_V = (  # of the last layers of E2B and E4B, which use an earlier layer's
    ("attn.q_einsum.w",            ("self_attn.q_proj.weight",),                              "heads"),
)
_EVERY_LAYER = (
    ("attn.attn_vec_einsum.w",     ("self_attn.o_proj.weight",),                              "output_heads"),
    ("attn._query_norm.scale",     ("self_attn.q_norm.weight",),                              "same"),
    ("mlp.gate_proj.kernel",       ("mlp.gate_proj.weight",),                                 "linear"),
    ("mlp.up_proj.kernel",         ("mlp.up_proj.weight",),                                   "linear"),
    ("mlp.down_proj.kernel",       ("mlp.down_proj.weight",),                                 "linear"),
    ("pre_attention_norm.scale",   ("input_layernorm.weight",),                               "same"),
    ("post_attention_norm.scale",  ("post_attention_layernorm.weight",),                      "same"),
    ("pre_ffw_norm.scale",         ("pre_feedforward_layernorm.weight",),                     "same"),
    ("post_ffw_norm.scale",        ("post_feedforward_layernorm.weight",),                    "same"),
    ("skip_scale",                 ("layer_scalar",),                                         "same"),
)
_PER_LAYER_INPUT = (  # E2B, E4B
    ("per_layer_input_gate.w",           ("per_layer_input_gate.weight",),                    "transposed"),
    ("per_layer_projection.w",           ("per_layer_projection.weight",),                    "transposed"),
    ("post_per_layer_input_norm.scale",  ("post_per_layer_input_norm.weight",),               "same"),
)
_EXPERTS = (  # 26B-A4B
    ("dense_post_ffw_norm.scale",  ("post_feedforward_layernorm_1.weight",),                  "same"),
    ("moe_pre_ffw_norm.scale",     ("pre_feedforward_layernorm_2.weight",),                   "same"),
    ("moe_post_ffw_norm.scale",    ("post_feedforward_layernorm_2.weight",),                  "same"),
    ("moe.router_scale",           ("router.scale",),                                         "same"),
    ("moe.router_logits",          ("router.proj.weight",),                                   "transposed"),
    ("moe.per_expert_scale",       ("router.per_expert_scale",),                              "same"),
    ("moe.gating_einsum",          ("experts.gate_up_proj",),                                 "experts_in"),
    ("moe.linear",                 ("experts.down_proj",),                                    "experts_out"),
)
_OUTSIDE_LAYERS = (
    ("embedder.input_embedding",   ("embed_tokens.weight",),                                  "same"),
    ("final_norm.scale",           ("norm.weight",),                                          "same"),
)
_PER_LAYER_INPUT_OUTSIDE_LAYERS = (
    ("embedder.per_layer_input_embedding",        ("embed_tokens_per_layer.weight",),         "table_by_layer"),
    ("embedder.per_layer_model_projection.w",     ("per_layer_model_projection.weight",),     "output_by_layer"),
    ("embedder.per_layer_projection_norm.scale",  ("per_layer_projection_norm.weight",),      "same"),
)
# fmt: on

_UNREAD_WITHOUT_K_AND_V = ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight")
"""Tensors that released files have for layers that use another's keys and values, and that nobody reads."""

PREFIXES = ("model.language_model.", "model.")
"""Names in a multimodal checkpoint (`Gemma4ForConditionalGeneration`) and in a text-only one (`Gemma4ForCausalLM`)."""


@dataclass(frozen=True)
class Row:
    """One Tunix parameter and its Hugging Face tensors, names without the file's prefix."""

    tunix: str
    hf: tuple[str, ...]
    layout: Layout

    def lora_names(self) -> tuple[str, str]:
        """Paths of the adapter's A and B in the Tunix model."""
        return f"{self.tunix}_lora_a", f"{self.tunix}_lora_b"


def gemma4_rows(text: dict[str, Any]) -> list[Row]:
    """The whole map of a Gemma 4, from its config.json's text part."""
    has_own_input = bool(text.get("hidden_size_per_layer_input"))
    outside = (*_OUTSIDE_LAYERS, *(_PER_LAYER_INPUT_OUTSIDE_LAYERS if has_own_input else ()))
    in_each = (*_EVERY_LAYER, *(_PER_LAYER_INPUT if has_own_input else ()), *(_EXPERTS if text.get("enable_moe_block") else ()))
    rows = [Row(tunix, hf, LAYOUTS[layout]) for tunix, hf, layout in outside]
    for i, kind in enumerate(text["layer_types"]):
        k_is_v = kind == "full_attention" and text["attention_k_eq_v"]
        attention = _NO_K_NOR_V if i >= _first_without_k_and_v(text) else _K_IS_V if k_is_v else _K_AND_V
        rows += [
            Row(f"layers.{i}.{tunix}", tuple(f"layers.{i}.{name}" for name in hf), LAYOUTS[layout])
            for tunix, hf, layout in (*attention, *in_each)
        ]
    return rows


def unread_tensors(text: dict[str, Any]) -> frozenset[str]:
    """Tensors that the files may have although the model has no use for them, names without the file's prefix."""
    layers = range(_first_without_k_and_v(text), text["num_hidden_layers"])
    return frozenset(f"layers.{i}.{name}" for i in layers for name in _UNREAD_WITHOUT_K_AND_V)


def _first_without_k_and_v(text: dict[str, Any]) -> int:
    return text["num_hidden_layers"] - (text.get("num_kv_shared_layers") or 0)


def lora_update(row: Row, a: Array, b: Array, scale: float) -> tuple[Array, ...]:
    """The adapter's update of a row, one array a Hugging Face tensor, in float64: scale · A·B. `scale` is alpha / rank."""
    assert row.layout.lora is not None
    delta = scale * np.einsum(row.layout.lora, a.astype(np.float64), b.astype(np.float64))
    return row.layout.to_hf(delta)

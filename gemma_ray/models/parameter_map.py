"""Which Tunix parameter is which Hugging Face tensor, and how one becomes the other. Loading, merging and exporting all read this table.

Dimensions: d embed, n query heads, k KV heads, h head_dim, f MLP hidden, v vocabulary, r LoRA rank. Hugging Face stores a projection as
[out, in]; Tunix keeps heads apart and fuses K and V of the sliding-window layers into one parameter:

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
}

_GLOBAL_ATTENTION = (
    ("attn.q_einsum.w",            ("self_attn.q_proj.weight",),                              "heads"),
    ("attn.k_einsum.w",            ("self_attn.k_proj.weight",),                              "heads"),
)
_SLIDING_ATTENTION = (
    ("attn.q_einsum.w",            ("self_attn.q_proj.weight",),                              "heads"),
    ("attn.kv_einsum.w",           ("self_attn.k_proj.weight", "self_attn.v_proj.weight"),    "stacked_heads"),
)
_EVERY_LAYER = (
    ("attn.attn_vec_einsum.w",     ("self_attn.o_proj.weight",),                              "output_heads"),
    ("attn._query_norm.scale",     ("self_attn.q_norm.weight",),                              "same"),
    ("attn._key_norm.scale",       ("self_attn.k_norm.weight",),                              "same"),
    ("mlp.gate_proj.kernel",       ("mlp.gate_proj.weight",),                                 "linear"),
    ("mlp.up_proj.kernel",         ("mlp.up_proj.weight",),                                   "linear"),
    ("mlp.down_proj.kernel",       ("mlp.down_proj.weight",),                                 "linear"),
    ("pre_attention_norm.scale",   ("input_layernorm.weight",),                               "same"),
    ("post_attention_norm.scale",  ("post_attention_layernorm.weight",),                      "same"),
    ("pre_ffw_norm.scale",         ("pre_feedforward_layernorm.weight",),                     "same"),
    ("post_ffw_norm.scale",        ("post_feedforward_layernorm.weight",),                    "same"),
    ("skip_scale",                 ("layer_scalar",),                                         "same"),
)
_OUTSIDE_LAYERS = (
    ("embedder.input_embedding",   ("embed_tokens.weight",),                                  "same"),
    ("final_norm.scale",           ("norm.weight",),                                          "same"),
)
# fmt: on

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
    """The whole map of a dense Gemma 4, from its config.json's text part."""
    rows = [Row(tunix, hf, LAYOUTS[layout]) for tunix, hf, layout in _OUTSIDE_LAYERS]
    for i, kind in enumerate(text["layer_types"]):
        shares_kv = kind == "full_attention" and text["attention_k_eq_v"]
        attention = _GLOBAL_ATTENTION if shares_kv else _SLIDING_ATTENTION
        rows += [
            Row(f"layers.{i}.{tunix}", tuple(f"layers.{i}.{name}" for name in hf), LAYOUTS[layout])
            for tunix, hf, layout in (*attention, *_EVERY_LAYER)
        ]
    return rows


def lora_update(row: Row, a: Array, b: Array, scale: float) -> tuple[Array, ...]:
    """The adapter's update of a row, one array a Hugging Face tensor, in float64: scale · A·B. `scale` is alpha / rank."""
    assert row.layout.lora is not None
    delta = scale * np.einsum(row.layout.lora, a.astype(np.float64), b.astype(np.float64))
    return row.layout.to_hf(delta)

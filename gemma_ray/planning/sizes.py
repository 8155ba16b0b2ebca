"""Arithmetic of a Gemma 4 from its config.json: parameters, FLOPs a token, bytes of the key-value cache.

`text` is config.json's text part throughout; a multiply-add counts as two FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

GLOBAL = "full_attention"


@dataclass(frozen=True)
class Layer:
    """What differs between layers."""

    is_global: bool
    kv_heads: int
    head_dim: int
    mlp: int
    """Hidden size of the dense MLP."""
    makes_kv: bool
    """False where keys and values of an earlier layer are used (E2B, E4B)."""


def layers(text: dict[str, Any]) -> Iterator[Layer]:
    """The layers in order."""
    count, shared = text["num_hidden_layers"], text.get("num_kv_shared_layers") or 0
    for i, kind in enumerate(text["layer_types"]):
        is_global, makes_kv = kind == GLOBAL, i < count - shared
        heads = (text.get("num_global_key_value_heads") or text["num_key_value_heads"]) if is_global else text["num_key_value_heads"]
        wide = bool(text.get("use_double_wide_mlp")) and not makes_kv
        head_dim = text["global_head_dim"] if is_global else text["head_dim"]
        yield Layer(is_global, heads, head_dim, text["intermediate_size"] * (2 if wide else 1), makes_kv)


def product_parameters(text: dict[str, Any]) -> int:
    """Weights that each token is multiplied with: all matrices of the layers, of a mixture the experts that a token visits, and the tied
    output table."""
    embed, heads = text["hidden_size"], text["num_attention_heads"]
    total = text["vocab_size"] * embed
    per_layer = text.get("hidden_size_per_layer_input") or 0
    for layer in layers(text):
        total += 2 * embed * heads * layer.head_dim + 3 * embed * layer.mlp
        if layer.makes_kv:
            total += embed * layer.kv_heads * layer.head_dim * (1 if layer.is_global and text["attention_k_eq_v"] else 2)
        if text.get("enable_moe_block"):
            total += embed * text["num_experts"] + 3 * embed * text["moe_intermediate_size"] * text["top_k_experts"]
        total += 3 * embed * per_layer  # gate and projection of a layer, and the layer's part of the model's projection
    return total


def forward_flops_per_token(text: dict[str, Any]) -> int:
    """Matrix products of a forward pass, attention scores left out: 2N."""
    return 2 * product_parameters(text)


def train_flops_per_token(text: dict[str, Any], remat: str) -> int:
    """Matrix products of a LoRA step: 4N, since only activations get gradients; 6N when every layer is computed again (the adapter's own
    products, about a hundredth, left out)."""
    return forward_flops_per_token(text) * (3 if remat == "layer" else 2)


def mean_keys(length: int, window: int | None) -> float:
    """Keys that a position of a causal row sees on average, at most `window` of them."""
    reach = min(window or length, length)
    return (reach * (reach + 1) / 2 + (length - reach) * reach) / length


def attention_flops_per_token(text: dict[str, Any], length: int) -> float:
    """Scores and mixtures of a forward pass, averaged over a row that is one document."""
    heads = text["num_attention_heads"]
    return sum(
        4 * heads * layer.head_dim * mean_keys(length, None if layer.is_global else text["sliding_window"]) for layer in layers(text)
    )


def kv_bytes_per_sequence(text: dict[str, Any], length: int, bytes_per_element: float, tp: int = 1) -> float:
    """Cache of one sequence of `length` tokens on one device. A sliding-window layer holds at most its window; heads that `tp` does not
    divide are replicated, so that each device holds at least one."""
    total = 0.0
    for layer in layers(text):
        if layer.makes_kv:
            kept = length if layer.is_global else min(length, text["sliding_window"])
            total += kept * -(-layer.kv_heads // tp) * layer.head_dim * 2 * bytes_per_element
    return total

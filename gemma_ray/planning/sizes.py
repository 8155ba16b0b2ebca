"""Arithmetic of a Gemma 4 from its config.json: parameters, FLOPs a token, bytes of the key-value cache.

`text` is config.json's text part throughout; a multiply-add counts as two FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from gemma_ray.errors import RecipeError
from gemma_ray.models.attention import block_size
from gemma_ray.training.lora import modules_of

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


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters by what they are; together those of transformers' `Gemma4ForCausalLM`, of which a layer's scalar is no parameter but a
    buffer. Tunix counts it, one a layer."""

    embedding: int
    """The table, which is the output head too."""
    per_layer_embedding: int
    """E2B and E4B: the second table, of which a token uses one row."""
    per_layer_projections: int
    attention: int
    mlp: int
    experts: int
    """With router and scales."""
    norms: int
    total: int
    active: int
    """That work on one token: without idle experts and without the second table."""


def parameter_counts(text: dict[str, Any]) -> ParameterCounts:
    """Parameters of a model."""
    embed, heads, per_layer = text["hidden_size"], text["num_attention_heads"], text.get("hidden_size_per_layer_input") or 0
    moe, count, vocab = bool(text.get("enable_moe_block")), text["num_hidden_layers"], text["vocab_size"]
    attention = mlp = experts = idle = 0
    norms = embed + per_layer
    for layer in layers(text):
        attention += embed * layer.head_dim * (2 * heads + layer.kv_heads * _kv_matrices(text, layer))
        mlp += 3 * embed * layer.mlp
        norms += (4 + 3 * moe + bool(per_layer)) * embed + layer.head_dim * (2 if layer.makes_kv else 1)
    if moe:
        one = 3 * embed * text["moe_intermediate_size"]
        experts = count * (text["num_experts"] * (one + embed + 1) + embed)
        idle = count * one * (text["num_experts"] - text["top_k_experts"])
    rows, projections = text.get("vocab_size_per_layer_input", vocab) * count * per_layer, 3 * embed * per_layer * count
    total = vocab * embed + rows + projections + attention + mlp + experts + norms
    return ParameterCounts(vocab * embed, rows, projections, attention, mlp, experts, norms, total, total - rows - idle)


def _kv_matrices(text: dict[str, Any], layer: Layer) -> int:
    return 0 if not layer.makes_kv else 1 if layer.is_global and text["attention_k_eq_v"] else 2


def lora_parameters(text: dict[str, Any], rank: int, targets: Iterable[str]) -> int:
    """Parameters of the trainer's adapter. `targets` are names as in `lora.targets`; K and V of a layer are one module with one A, or K
    alone (`gemma_ray.training.lora.MODULES`). Experts get no adapter.

    Raises RecipeError for a rank below 1, ModelError for a name that is no target.
    """
    if rank < 1:
        raise RecipeError(f"lora.rank = {rank}: must be at least 1")
    embed, named, sides = text["hidden_size"], set(modules_of(targets)), 0
    for layer in layers(text):
        queries = text["num_attention_heads"] * layer.head_dim
        sides += (embed + queries) * len(named & {"q_einsum", "attn_vec_einsum"})
        sides += (embed + layer.mlp) * len(named & {"gate_proj", "up_proj", "down_proj"})
        matrices = _kv_matrices(text, layer)
        if matrices and ("kv_einsum" if matrices == 2 else "k_einsum") in named:
            sides += embed + layer.kv_heads * layer.head_dim * matrices
    return rank * sides


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


@dataclass(frozen=True)
class TrainFlops:
    """FLOPs of one token in a training step."""

    base: float
    """Forward 2 a weight, backward to activations 2, 2 for those that are computed again, and 2 to weights where they are trained."""
    adapter: float
    """Forward 2 a parameter, backward 4 (A and B get gradients too), 2 again under remat."""
    attention: float
    """Scores and mixtures: forward once, backward 2.5 times, once more where computed again."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.base + self.adapter + self.attention


def train_flops(
    text: dict[str, Any], length: int, remat: str, rank: int | None, targets: Iterable[str] = (), documents: int = 1
) -> TrainFlops:
    """A step, part by part; of a LoRA adapter of `rank`, or of all weights when that is None.

    The output head is never computed again, since the loss works out its gradient in the same pass, nor is E2B's and E4B's projection of
    the embeddings, which has no gradient either. `norms` and `elementwise` compute no products again. Products of the tiny lowered step
    are exactly these, less the first layer's gradients to the frozen embeddings (a third of a percent of 31B's forward pass).

    Backward attention is five products to the forward pass's two at the least (Dao 2023, arXiv 2307.08691), which is 2.5.
    """
    again = remat == "layer"
    outside = text["hidden_size"] * (text.get("hidden_size_per_layer_input") or 0) * text["num_hidden_layers"]
    head, products = text["vocab_size"] * text["hidden_size"], product_parameters(text)
    base = 2 * products + 2 * (products - outside) + (2 * (products - outside - head) if again else 0)
    base += 2 * products if rank is None else 0
    attention = attention_flops_per_token(text, length, documents) * (3.5 + again)
    adapter = 0 if rank is None else lora_parameters(text, rank, targets) * (8 if again else 6)
    return TrainFlops(base, adapter, attention)


def mean_keys(length: int, window: int | None) -> float:
    """Keys that a position of a causal row sees on average, at most `window` of them."""
    reach = min(window or length, length)
    return (reach * (reach + 1) / 2 + (length - reach) * reach) / length


def attention_flops_per_token(text: dict[str, Any], length: int, documents: int = 1) -> float:
    """Scores and mixtures of a forward pass, averaged over a row that is so many documents, as even as they come.

    Raises RecipeError when there are no tokens, or more documents than tokens.
    """
    if not 1 <= documents <= length:
        raise RecipeError(f"a row of {length} tokens cannot be {documents} documents; both are at least 1, and documents at most tokens")
    heads, (short, longer) = text["num_attention_heads"], divmod(length, documents)

    def keys(window: int | None) -> float:
        long_tokens = longer * (short + 1)
        return (long_tokens * mean_keys(short + 1, window) + (length - long_tokens) * mean_keys(short, window)) / length

    return sum(4 * heads * layer.head_dim * keys(None if layer.is_global else text["sliding_window"]) for layer in layers(text))


SPLASH_BACKWARD = 3.5
"""Forward passes of attention that splash's backward kernels cost: the one for keys and values and the one for queries each work out scores
and their gradient, seven products to the forward kernel's two (jax.experimental.pallas.ops.tpu.splash_attention)."""


def splash_flops_per_token(text: dict[str, Any], length: int, block: int | None = None) -> float:
    """What the splash kernel computes in a forward pass of a row: whole blocks, of which the mask uses part. `block` as in the recipe.

    Raises ModelError when no block divides the row.
    """

    def keys(window: int | None, side: int) -> float:
        """Of the blocks that a block of queries meets: those from its first position's window to itself."""
        first = [max(0, start - (window or length) + 1) // side for start in range(0, length, side)]
        return sum((row + 1 - column) * side for row, column in enumerate(first)) / len(first)

    return sum(
        4
        * text["num_attention_heads"]
        * layer.head_dim
        * keys(None if layer.is_global else text["sliding_window"], block_size(length, layer.head_dim, block))
        for layer in layers(text)
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


@dataclass(frozen=True)
class KvBytesPerToken:
    """Bytes that one more token adds to the cache."""

    device: float
    """Up to the sliding window."""
    device_beyond_window: float
    """After it: the global layers alone."""
    all_devices: float
    """Of `device`, replicated heads counted as often as they are held."""


def kv_bytes_per_token(text: dict[str, Any], bytes_per_element: float, tp: int = 1) -> KvBytesPerToken:
    """Cache of a token on one device and on all `tp` of a replica."""
    window = text["sliding_window"]
    device = kv_bytes_per_sequence(text, 1, bytes_per_element, tp)
    beyond = kv_bytes_per_sequence(text, window + 1, bytes_per_element, tp) - kv_bytes_per_sequence(text, window, bytes_per_element, tp)
    return KvBytesPerToken(device, beyond, device * tp)

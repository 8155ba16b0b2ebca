"""Arithmetic of the released sizes, worked by hand or by brute force."""

from __future__ import annotations

from typing import Any

import pytest

from gemma_ray.errors import RecipeError
from gemma_ray.models.axes import AXES
from gemma_ray.models.gemma4 import OFFICIAL, text_config
from gemma_ray.planning.sizes import (
    attention_flops_per_token,
    forward_flops_per_token,
    kv_bytes_per_sequence,
    kv_bytes_per_token,
    lora_parameters,
    mean_keys,
    parameter_counts,
    product_parameters,
    splash_flops_per_token,
    train_flops,
)

B31 = text_config("gemma4-31b")


def test_31b_multiplies_each_token_with_30_7_billion_weights() -> None:
    sliding = 3 * 5376 * 8192 + 3 * 5376 * 21504
    full = 2 * 5376 * 16384 + 5376 * 2048 + 3 * 5376 * 21504
    by_hand = 50 * sliding + 10 * full + 262_144 * 5376
    assert product_parameters(B31) == by_hand == 30_696_013_824
    assert forward_flops_per_token(B31) == 2 * by_hand


@pytest.mark.parametrize(("name", "billions"), [("gemma4-26b-a4b", 3.8), ("gemma4-e4b", 4.5), ("gemma4-e2b", 2.3)])
def test_the_other_sizes_are_near_their_names(name: str, billions: float) -> None:
    """As the model cards say: active parameters of A4B, effective ones of E4B and E2B (without the per-layer embeddings)."""
    assert product_parameters(text_config(name)) / 1e9 == pytest.approx(billions, rel=0.05)


@pytest.mark.parametrize(("length", "window"), [(1, None), (7, None), (7, 3), (7, 7), (7, 100), (4096, 1024)])
def test_mean_keys_is_the_average_over_positions(length: int, window: int | None) -> None:
    seen = [min(position + 1, window or length) for position in range(length)]
    assert mean_keys(length, window) == pytest.approx(sum(seen) / length)


def test_attention_of_31b_by_hand() -> None:
    keys_sliding, keys_full = (1024 * 1025 / 2 + 3072 * 1024) / 4096, 4097 / 2
    assert attention_flops_per_token(B31, 4096) == pytest.approx(4 * 32 * (50 * 256 * keys_sliding + 10 * 512 * keys_full))


def test_kv_cache_of_31b_by_hand() -> None:
    """10 global layers × 4 heads × 512 × 2, 50 sliding layers × 16 × 256 × 2 capped at the window of 1,024."""
    for length in (512, 1024, 16_384):
        by_hand = 2 * (10 * 4 * 512 * 2 * length + 50 * 16 * 256 * 2 * min(length, 1024))
        assert kv_bytes_per_sequence(B31, length, 2) == by_hand
    assert kv_bytes_per_sequence(B31, 16_384, 1) == kv_bytes_per_sequence(B31, 16_384, 2) / 2


def test_heads_are_replicated_when_tp_exceeds_them() -> None:
    full, sliding = 10 * 512 * 2 * 2 * 1000, 50 * 256 * 2 * 2 * 1000
    assert kv_bytes_per_sequence(B31, 1000, 2, tp=4) == full * 1 + sliding * 4
    assert kv_bytes_per_sequence(B31, 1000, 2, tp=8) == full * 1 + sliding * 2  # each device holds a global head twice over


def test_layers_that_share_keys_store_none() -> None:
    e4b = text_config("gemma4-e4b")
    own = 42 - 18
    full = own // 6
    assert kv_bytes_per_sequence(e4b, 100, 2) == 100 * 2 * 2 * 2 * (full * 512 + (own - full) * 256)


@pytest.mark.parametrize("name", OFFICIAL)
def test_every_size_has_all_figures(name: str) -> None:
    text = text_config(name)
    assert 0 < attention_flops_per_token(text, 4096) < forward_flops_per_token(text)


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("name", [*OFFICIAL, "gemma4-tiny"])
def test_parameters_are_transformers(name: str) -> None:
    """Shapes only: nothing is allocated."""
    import torch
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    text = text_config(name)
    with torch.device("meta"):
        config = Gemma4TextConfig(**{key: value for key, value in text.items() if key not in ("architectures", "model_type", "dtype")})
        model: Any = Gemma4ForCausalLM(config)
    sizes = {path: p.numel() for path, p in model.named_parameters()}
    counts = parameter_counts(text)

    def of(*parts: str) -> int:
        return sum(size for path, size in sizes.items() if any(part in path for part in parts))

    assert counts.total == sum(sizes.values())
    assert counts.norms == of("norm")
    assert counts.experts == of(".experts.", ".router.")
    assert counts.mlp == of(".mlp.")
    assert counts.attention == of(".self_attn.") - of("self_attn.q_norm", "self_attn.k_norm")
    assert counts.embedding == of("embed_tokens.weight")
    assert counts.per_layer_embedding == of("embed_tokens_per_layer")


def test_31b_is_all_active_and_a4b_is_not() -> None:
    b31, a4b = parameter_counts(B31), parameter_counts(text_config("gemma4-26b-a4b"))
    assert b31.total == b31.active == 30_697_345_280
    assert a4b.total - a4b.active == 30 * 3 * 2816 * 704 * (128 - 8)


def test_the_adapter_of_31b_by_hand() -> None:
    """118 M at rank 16. K and V of a sliding layer share one A; a global layer has K alone."""
    mlp = 3 * (5376 + 21504)
    sliding = 2 * (5376 + 8192) + (5376 + 2 * 4096) + mlp
    full = 2 * (5376 + 16384) + (5376 + 2048) + mlp
    assert lora_parameters(B31, 16, ALL) == 16 * (50 * sliding + 10 * full) == 118_128_640
    assert lora_parameters(B31, 16, ("k_proj",)) == 16 * (50 * (5376 + 2 * 4096) + 10 * (5376 + 2048))
    assert lora_parameters(B31, 16, ()) == 0
    with pytest.raises(RecipeError, match=r"lora\.rank = 0"):
        lora_parameters(B31, 0, ALL)


@pytest.mark.parametrize("targets", [ALL, ("q_proj", "down_proj")])
def test_the_adapter_is_the_trainers(targets: tuple[str, ...]) -> None:
    import math

    import jax

    from gemma_ray.training.build import abstract_model
    from gemma_ray.training.config import LoraConfig

    mesh = jax.make_mesh((1, 1, 1), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3, devices=jax.devices()[:1])
    text = text_config("gemma4-tiny")
    leaves = abstract_model(text, mesh, "float32", LoraConfig(rank=3, targets=targets)).adapter_leaves
    assert lora_parameters(text, 3, targets) == sum(math.prod(leaf.shape) for leaf in leaves.values())


@pytest.mark.parametrize(("length", "documents"), [(1, 1), (7, 2), (7, 7), (300, 2), (301, 4)])
def test_attention_is_counted_pair_by_pair(length: int, documents: int) -> None:
    """Every pair of query and key of one document that the mask lets through, 4 FLOPs a head and dimension."""
    text = text_config("gemma4-tiny")
    document = [i for i in range(documents) for _ in range(length // documents + (i < length % documents))]
    pairs = [(q, k) for q in range(length) for k in range(q + 1) if document[q] == document[k]]
    near = sum(q - k < 128 for q, k in pairs)
    expected = 4 * 4 * (5 * 32 * near + 1 * 64 * len(pairs)) / length
    assert attention_flops_per_token(text, length, documents) == pytest.approx(expected)


@pytest.mark.parametrize(("length", "documents"), [(0, 1), (5, 0), (5, 6)])
def test_a_row_that_cannot_be_is_refused(length: int, documents: int) -> None:
    with pytest.raises(RecipeError, match="documents"):
        attention_flops_per_token(B31, length, documents)


def test_a_lora_step_of_31b_by_hand() -> None:
    n, head, attention = 30_696_013_824, 262_144 * 5376, attention_flops_per_token(B31, 4096)
    kept, again = train_flops(B31, 4096, "none", 16, ALL), train_flops(B31, 4096, "layer", 16, ALL)
    assert (kept.base, kept.adapter, kept.attention) == (4 * n, 6 * 118_128_640, pytest.approx(3.5 * attention))
    assert (again.base, again.adapter, again.attention) == (6 * n - 2 * head, 8 * 118_128_640, pytest.approx(4.5 * attention))
    assert train_flops(B31, 4096, "elementwise", 16, ALL) == kept
    assert kept.total == pytest.approx(kept.base + kept.adapter + kept.attention)


def test_training_all_weights_adds_a_gradient_for_each() -> None:
    full = train_flops(B31, 4096, "none", None)
    assert (full.base, full.adapter) == (6 * 30_696_013_824, 0)


@pytest.mark.parametrize(("length", "block"), [(256, 128), (512, 128), (1024, 256)])
def test_splash_computes_whole_blocks(length: int, block: int) -> None:
    """Every pair of positions of a block that holds a pair the mask lets through, 4 FLOPs a head and dimension."""
    text = text_config("gemma4-tiny")

    def pairs(window: int) -> int:
        used = {(q // block, k // block) for q in range(length) for k in range(max(0, q - window + 1), q + 1)}
        return len(used) * block * block

    expected = 4 * 4 * (5 * 32 * pairs(128) + 1 * 64 * pairs(length)) / length
    assert splash_flops_per_token(text, length, block) == pytest.approx(expected)


def test_splash_of_31b_by_hand() -> None:
    """Blocks of 512 in a row of 4,096: a window of 1,024 meets 1, 2, then 3 of them; causal ones 1 to 8."""
    sliding, full = (1 + 2 + 6 * 3) / 8 * 512, (1 + 8) / 2 * 512
    assert splash_flops_per_token(B31, 4096) == pytest.approx(4 * 32 * (50 * 256 * sliding + 10 * 512 * full))


def test_what_has_no_gradient_in_e4b_costs_its_forward_pass_alone() -> None:
    e4b = text_config("gemma4-e4b")
    kept = train_flops(e4b, 1024, "none", 8, ALL)
    assert kept.base == 4 * product_parameters(e4b) - 2 * 42 * 256 * 2560


def test_a_token_of_31b_on_v6e_2x4() -> None:
    found = kv_bytes_per_token(B31, 2, tp=8)
    assert (found.device, found.device_beyond_window) == (122_880, 20_480)
    assert found.all_devices == 983_040  # 901,120 on one device: the global heads are held twice
    assert kv_bytes_per_token(B31, 2).all_devices == 901_120

"""Arithmetic of the released sizes, worked by hand or by brute force."""

from __future__ import annotations

import pytest

from gemma_ray.models.gemma4 import OFFICIAL, text_config
from gemma_ray.planning.sizes import (
    attention_flops_per_token,
    forward_flops_per_token,
    kv_bytes_per_sequence,
    mean_keys,
    product_parameters,
    train_flops_per_token,
)

B31 = text_config("gemma4-31b")


def test_31b_multiplies_each_token_with_30_7_billion_weights() -> None:
    sliding = 3 * 5376 * 8192 + 3 * 5376 * 21504
    full = 2 * 5376 * 16384 + 5376 * 2048 + 3 * 5376 * 21504
    by_hand = 50 * sliding + 10 * full + 262_144 * 5376
    assert product_parameters(B31) == by_hand == 30_696_013_824
    assert forward_flops_per_token(B31) == 2 * by_hand
    assert train_flops_per_token(B31, "none") == 4 * by_hand
    assert train_flops_per_token(B31, "layer") == 6 * by_hand


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

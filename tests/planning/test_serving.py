"""A serving plan against numbers worked by hand, transformers' parameters, a loop over positions, and upstream's buckets."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from gemma_ray.errors import RecipeError
from gemma_ray.models.gemma4 import OFFICIAL, text_config
from gemma_ray.planning.hardware import chip
from gemma_ray.planning.serving import ServePlan, cache_bytes, mean_kept, plan_serving, token_buckets, weight_bytes
from gemma_ray.planning.sizes import kv_bytes_per_sequence

B31 = text_config("gemma4-31b")
GIB = 2**30
V6E, H100 = chip("v6e"), chip("h100")
# 31B: 50 sliding layers of 32 query and 16 KV heads of 256, 10 global ones of 32 and 4 heads of 512.
MLP, Q_AND_O = 60 * 3 * 5376 * 21504, 50 * 2 * 5376 * 8192 + 10 * 2 * 5376 * 16384
TABLE, NORMS = 262_144 * 5376, 60 * 4 * 5376 + 50 * 2 * 256 + 10 * 2 * 512 + 5376
PRODUCTS = Q_AND_O + MLP + 50 * 5376 * 8192 + 10 * 5376 * 2048  # the sliding layers' K and V, the global ones' K


def serve(where: Any, devices: int, tp: int, contexts: tuple[int, ...] = (4096,), **more: Any) -> ServePlan:
    given = {"weight_bytes_per_element": 2, "kv_bytes_per_element": 2, "output_tokens": 512, "activation_bytes": 1e9, **more}
    return plan_serving(more.pop("text", B31), where, devices, tp, contexts=contexts, **{k: v for k, v in given.items() if k != "text"})


def test_31b_on_v6e_2x4_by_hand() -> None:
    """tp=8: a sliding layer's 16 KV heads are 2 a device, the 4 of a global layer are on two devices each."""
    plan = serve(V6E, 8, 8)
    kv_weights = 50 * 2 * 5376 * 2 * 256 + 10 * 2 * 5376 * 1 * 512
    weights = 2 * ((TABLE + Q_AND_O + MLP) / 8 + kv_weights + NORMS)
    assert plan.weight_bytes == pytest.approx(weights)
    assert plan.kv_budget_bytes == pytest.approx(0.9 * 31.25 * GIB - weights - 1e9)
    assert (plan.kv_bytes_per_token.in_global, plan.kv_bytes_per_token.in_sliding) == (10 * 1 * 512 * 2 * 2, 50 * 2 * 256 * 2 * 2)

    c = plan.contexts[0]
    kv = 20_480 * (4096 + 512) + 102_400 * 1024
    assert c.kv_bytes == kv == 199_229_440
    assert (c.sequences, c.sequences_whole) == (plan.kv_budget_bytes // kv, plan.kv_budget_bytes // (122_880 * 4608)) == (107, 37)
    assert (plan.fits, plan.missing_bytes, plan.replicas) == (True, 0, 1)

    # Prefill: two chunks of 2,048. Causal pairs of query and key; a sliding layer's are 1,024 each after the first 1,024.
    pairs_sliding, pairs_full = 1024 * 1025 / 2 + 3072 * 1024, 4096 * 4097 / 2
    attention = 4 * 32 * (50 * 256 * pairs_sliding + 10 * 512 * pairs_full)
    compute = (2 * PRODUCTS * 4096 + 2 * 2 * TABLE + attention) / (8 * 918e12)
    assert c.chunks == ((2048, 2048), (2048, 2048))
    assert c.prefill_compute_s == pytest.approx(compute)
    assert c.prefill_memory_s == pytest.approx(2 * weights / 1640e9)
    assert c.ttft_floor_s == pytest.approx(compute)

    # Decode: caches of 4,097 to 4,608 tokens are 4,352.5 on average; the sliding layers are full.
    cache = 20_480 * 4352.5 + 102_400 * 1024
    assert c.alone is not None
    assert c.full is not None
    assert c.alone.tpot_floor_s == c.alone.memory_s == pytest.approx((weights + cache) / 1640e9)
    assert c.full.batch == 107
    assert c.full.memory_s == pytest.approx((weights + 107 * cache) / 1640e9)
    keys = 4 * 32 * (50 * 256 * 1024 + 10 * 512 * 4352.5)
    assert c.full.compute_s == pytest.approx((2 * (PRODUCTS + TABLE) * 128 + 107 * keys) / (8 * 918e12))  # 107 padded to 128
    assert c.full.tokens_per_s_ceiling == pytest.approx(107 * 1640e9 / (weights + 107 * cache))
    assert c.full.usd_per_million_tokens_floor == pytest.approx(8 * 2.69 / 3600 / c.full.tokens_per_s_ceiling * 1e6)


def test_31b_on_two_h100_by_hand() -> None:
    plan = serve(H100, 2, 2, (300,))
    weights = 2 * ((TABLE + Q_AND_O + MLP + 50 * 2 * 5376 * 4096 + 10 * 2 * 5376 * 2048) / 2 + NORMS)
    assert plan.weight_bytes == pytest.approx(weights)
    assert plan.kv_budget_bytes == pytest.approx(0.9 * 80e9 - weights - 1e9)
    kv = (300 + 512) * (10 * 2 * 512 * 2 * 2 + 50 * 8 * 256 * 2 * 2)  # still inside the window
    c = plan.contexts[0]
    assert (c.kv_bytes, c.sequences) == (kv, plan.kv_budget_bytes // kv)
    assert (plan.token_buckets, c.chunks, c.padding_share) == ((), ((300, 300),), 0)
    attention = 4 * 32 * (50 * 256 + 10 * 512) * 300 * 301 / 2
    assert c.prefill_compute_s == pytest.approx((2 * PRODUCTS * 300 + 2 * TABLE + attention) / (2 * 989.4e12))
    assert c.ttft_floor_s == c.prefill_memory_s == pytest.approx(weights / 3350e9)


def test_eight_bit_weights_shrink_the_matrices_of_the_layers_and_multiply_faster() -> None:
    plan, wide = serve(H100, 2, 2, weight_bytes_per_element=1), serve(H100, 2, 2)
    assert wide.weight_bytes - plan.weight_bytes == pytest.approx((wide.weight_bytes - TABLE - 2 * NORMS) / 2)
    ratio = wide.contexts[0].prefill_compute_s / plan.contexts[0].prefill_compute_s
    assert 1.8 < ratio < 2  # attention stays bfloat16


def test_an_eight_bit_cache_is_half_as_large_where_heads_fill_words() -> None:
    assert serve(H100, 2, 2, kv_bytes_per_element=1).contexts[0].kv_bytes == serve(H100, 2, 2).contexts[0].kv_bytes / 2
    plan, wide = serve(V6E, 8, 8, kv_bytes_per_element=1).kv_bytes_per_token, serve(V6E, 8, 8).kv_bytes_per_token
    assert plan.in_sliding == wide.in_sliding / 2
    assert plan.in_global == wide.in_global  # one K and one V head of one byte each take a whole 32-bit word


@pytest.mark.parametrize("name", OFFICIAL)
def test_on_one_device_the_weights_are_transformers_parameters_and_v_beside_k(name: str) -> None:
    import torch
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    text = text_config(name)
    with torch.device("meta"):
        config = Gemma4TextConfig(**{key: value for key, value in text.items() if key not in ("architectures", "model_type", "dtype")})
        model: Any = Gemma4ForCausalLM(config)
    globals_ = text["layer_types"].count("full_attention") if text["attention_k_eq_v"] else 0
    v_beside_k = globals_ * text["hidden_size"] * (text["num_global_key_value_heads"] or 0) * 512
    assert weight_bytes(text, 1, 2).total == 2 * (sum(p.numel() for p in model.parameters()) + v_beside_k)


@pytest.mark.parametrize("name", [*OFFICIAL, "gemma4-tiny"])
@pytest.mark.parametrize("tp", [1, 2])
def test_an_unpadded_cache_is_that_of_the_sizes(name: str, tp: int) -> None:
    text = text_config(name)
    for length in (1, 100, 5000):
        assert cache_bytes(text, tp, 2, False, False).of(length) == kv_bytes_per_sequence(text, length, 2, tp)


def test_layers_that_share_a_cache_store_nothing_and_read_it_again() -> None:
    e2b = text_config("gemma4-e2b")  # 35 layers, every fifth global, the last 20 without keys of their own
    stored, read = (cache_bytes(e2b, 1, 2, False, shared) for shared in (False, True))
    assert (stored.in_global, stored.in_sliding) == (3 * 512 * 2 * 2, 12 * 256 * 2 * 2)
    assert (read.in_global, read.in_sliding) == (7 * 512 * 2 * 2, 28 * 256 * 2 * 2)


def test_a_step_reads_the_experts_that_its_tokens_are_routed_to() -> None:
    weights = weight_bytes(text_config("gemma4-26b-a4b"), 1, 2)
    experts = 2 * 30 * 3 * 2816 * 704 * 128
    assert weights.experts == experts
    assert weights.read(1) - weights.always == pytest.approx(experts * 8 / 128)
    assert weights.read(2) - weights.always == pytest.approx(experts * (1 - (120 / 128) ** 2))
    assert weights.read(4096) == pytest.approx(weights.total)


@pytest.mark.parametrize(("first", "last", "window"), [(1, 1, 5), (1, 9, 5), (5, 9, 5), (6, 9, 5), (2, 4, 5), (4097, 4608, 1024)])
def test_the_mean_of_what_a_window_keeps(first: int, last: int, window: int) -> None:
    kept = [min(length, window) for length in range(first, last + 1)]
    assert mean_kept(first, last, window) == pytest.approx(sum(kept) / len(kept))


def test_buckets_are_upstreams() -> None:
    """The comment in tpu-inference, runner/tpu_runner.py, and its rule when the limit is no power of two."""
    assert token_buckets(2048) == (16, 32, 64, 128, 256, 512, 1024, 2048)
    assert token_buckets(600)[-2:] == (512, 1024)
    assert token_buckets(16) == token_buckets(1) == (16,)


@pytest.mark.parametrize(
    ("context", "chunks", "share"),
    [
        (1, ((1, 16),), 15 / 16),
        (2048, ((2048, 2048),), 0),
        (2049, ((2048, 2048), (1, 16)), 15 / 2064),
        (3100, ((2048, 2048), (1052, 2048)), 996 / 4096),
    ],
)
def test_a_prompt_is_padded_to_buckets_chunk_by_chunk(context: int, chunks: Any, share: float) -> None:
    c = serve(V6E, 8, 8, (context,)).contexts[0]
    assert c.chunks == chunks
    assert c.padding_share == pytest.approx(share)


def test_padding_costs_compute_on_a_tpu_alone() -> None:
    padded, exact = (serve(V6E, 8, 8, (n,)).contexts[0].prefill_compute_s for n in (1100, 2048))
    assert padded == pytest.approx(exact, rel=0.03)
    short, long = (serve(H100, 2, 2, (n,)).contexts[0].prefill_compute_s for n in (1100, 2048))
    assert short == pytest.approx(long * 1100 / 2048, rel=0.03)


def test_replicas_multiply_tokens_and_not_their_price() -> None:
    one, two = serve(H100, 2, 2).contexts[0].full, serve(H100, 4, 2).contexts[0].full
    assert one is not None
    assert two is not None
    assert (two.batch, two.tpot_floor_s) == (one.batch, one.tpot_floor_s)
    assert two.tokens_per_s_ceiling == pytest.approx(2 * one.tokens_per_s_ceiling)
    assert two.usd_per_million_tokens_floor == pytest.approx(one.usd_per_million_tokens_floor)


def test_a_model_that_is_too_large_says_how_much_is_missing() -> None:
    plan = serve(V6E, 1, 1)
    c = plan.contexts[0]
    assert not plan.fits
    assert plan.kv_budget_bytes < 0
    assert plan.missing_bytes == pytest.approx(plan.weight_bytes + 1e9 + c.kv_bytes - 0.9 * 31.25 * GIB)
    assert (c.sequences, c.sequences_whole, c.alone, c.full) == (0, 0, None, None)


def test_a_context_that_is_too_long_is_missing_what_it_lacks() -> None:
    roomy = serve(H100, 2, 2)
    activations = 1e9 + roomy.kv_budget_bytes - 0.5 * roomy.contexts[0].kv_bytes
    plan = serve(H100, 2, 2, (16, 4096), activation_bytes=activations)
    assert [c.sequences > 0 for c in plan.contexts] == [True, False]
    assert (plan.fits, plan.missing_bytes) == (False, pytest.approx(0.5 * roomy.contexts[0].kv_bytes))


def test_a_batch_is_no_larger_than_the_engine_allows_and_unpriced_chips_cost_nothing_known() -> None:
    full = serve(dataclasses.replace(V6E, usd_per_hour=None), 8, 8, max_num_seqs=5).contexts[0].full
    assert full is not None
    assert (full.batch, full.usd_per_million_tokens_floor) == (5, None)


@pytest.mark.parametrize(
    ("devices", "tp", "more", "message"),
    [
        (3, 3, {}, r"tp=3 does not divide num_attention_heads 32\. On 3 devices these work: 1$"),
        (8, 3, {}, r"tp=3 does not divide 8 devices into replicas\. On 8 devices these work: 1, 2, 4, 8$"),
        (64, 64, {}, r"tp=64 does not divide num_attention_heads 32"),
        (12, 12, {"text": {**B31, "num_attention_heads": 48}}, r"tp=12 neither splits nor evenly replicates 16 KV heads"),
        (0, 1, {}, "devices = 0"),
        (8, 0, {}, "tp = 0"),
        (8, 8, {"output_tokens": 0}, "output_tokens = 0"),
        (8, 8, {"contexts": ()}, "no context lengths"),
        (8, 8, {"contexts": (512, 0)}, "context 0"),
        (8, 8, {"kv_bytes_per_element": -1}, "kv_bytes_per_element = -1"),
        (8, 8, {"memory_utilization": 1.5}, "memory_utilization is at most 1"),
        (8, 8, {"max_num_batched_tokens": 64}, "max_num_seqs at most max_num_batched_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused(devices: int, tp: int, more: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        serve(V6E, devices, tp, **more)


def test_the_document_is_a_prediction_with_its_assumptions() -> None:
    document = json.loads(json.dumps(serve(V6E, 8, 8, activation_bytes=None).to_json()))
    assert document["prediction"] is True
    assert document["contexts"][0]["full"]["batch"] > 1
    assert "activations estimated" in document["assumptions"]["memory"]
    assert "1640000000000" in document["assumptions"]["chip"] or "1.64e+12" in document["assumptions"]["chip"]

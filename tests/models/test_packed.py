"""Packed rows: documents do not see each other, both attention kernels agree, and remat changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from gemma_ray.data.records import pack_row
from gemma_ray.data.source import padded
from gemma_ray.errors import ModelError
from gemma_ray.models.attention import attend, block_size, pick_kernel
from gemma_ray.models.gemma4 import text_config
from gemma_ray.models.packed import KEPT
from gemma_ray.models.templates import Tokens
from gemma_ray.training.build import build_model
from gemma_ray.training.config import LoraConfig
from gemma_ray.training.loss import next_token_loss
from gemma_ray.training.sharding import make_mesh


def documents(lengths: tuple[int, ...], row: int, rows: int = 1) -> dict[str, Any]:
    """Rows of random documents of these lengths, padded: tokens, positions, segments, loss_mask."""
    random = np.random.default_rng(0)
    positions, segments = np.zeros((rows, row), np.int32), np.zeros((rows, row), np.int32)
    start = 0
    for number, length in enumerate(lengths, 1):
        positions[:, start : start + length], segments[:, start : start + length] = np.arange(length), number
        start += length
    tokens = random.integers(8, 1024, (rows, row)).astype(np.int32)
    return {
        "tokens": tokens,
        "positions": positions,
        "segments": segments,
        "loss_mask": segments > 0,
        "scopes": np.zeros_like(tokens, np.int8),
    }


@pytest.fixture(scope="module")
def model(tiny_gemma: Path) -> Any:
    with make_mesh(4, 2) as mesh:
        return build_model(tiny_gemma, mesh, "float32", lora=None)


def logits_of(model: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    with make_mesh(4, 2), jax.default_matmul_precision("highest"):
        return np.asarray(nnx.jit(lambda m, b: m(b["tokens"], b["positions"], b["segments"]))(model, batch))


def test_a_packed_document_has_the_logits_it_has_alone(model: Any) -> None:
    lengths = (150, 7, 60, 23)  # the first longer than the sliding window of 128
    packed = documents(lengths, 256, rows=4)
    found = logits_of(model, packed)
    start = 0
    for length in lengths:
        alone = documents((length,), 256, rows=4)
        alone["tokens"][:, :length] = packed["tokens"][:, start : start + length]
        expected = logits_of(model, alone)[:, :length]
        assert np.abs(found[:, start : start + length] - expected).max() < 2e-4
        start += length
    unmasked = {**packed, "segments": np.ones_like(packed["segments"])}
    assert np.abs(logits_of(model, unmasked) - found).max() > 1e-2


def test_an_example_has_the_loss_in_a_packed_row_that_it_has_in_one_of_its_own(model: Any) -> None:
    """Through the bytes of a shard: three examples, the first longer than the sliding window, in one row and in three."""
    random = np.random.default_rng(1)
    examples = [Tokens(random.integers(8, 1024, n).astype(np.int32), np.arange(n) >= n // 3) for n in (150, 31, 60)]
    together, alone = pack_row(examples), [pack_row([example]) for example in examples]

    def loss(record: bytes, segment: int) -> float:
        row = {key: np.stack([column] * 4) for key, column in padded(record, 256).items()}
        row["loss_mask"] &= row["segments"] == segment
        with make_mesh(4, 2), jax.default_matmul_precision("highest"):
            return float(nnx.jit(lambda m, b: next_token_loss(m, **b)[0])(model, row)) / 4

    for number, record in enumerate(alone, 1):
        assert loss(together, number) == pytest.approx(loss(record, 1), rel=1e-6)


def tiled(x: np.ndarray, mesh: jax.sharding.Mesh) -> jax.Array:
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp")))


@pytest.mark.parametrize("window", [None, 96])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 256), (4, 4, 128)])
def test_splash_and_dot_agree_forward_and_backward(window: int | None, heads: int, kv_heads: int, dim: int) -> None:
    """The TPU kernel, interpreted, on a sharded mesh."""
    length, rows = 256, 4
    random = np.random.default_rng(1)
    query, key, value, weight = (
        random.normal(size=(rows, length, n, dim)).astype(np.float32) * dim**-0.25 for n in (heads, kv_heads, kv_heads, heads)
    )
    segments = documents((100, 60, 80), length, rows)["segments"]

    def mixed(kernel: Any) -> Any:
        def scalar(q: Any, k: Any, v: Any) -> Any:
            return (attend(q, k, v, segments, window=window, kernel=kernel, block=128) * weight).sum()

        with make_mesh(4, 2) as mesh, jax.default_matmul_precision("highest"):
            return jax.jit(jax.value_and_grad(scalar, argnums=(0, 1, 2)))(*(tiled(x, mesh) for x in (query, key, value)))

    (value_dot, grads_dot), (value_splash, grads_splash) = mixed("dot"), mixed("splash")
    assert float(value_splash) == pytest.approx(float(value_dot), rel=1e-4)
    for dot, splash in zip(grads_dot, grads_splash, strict=True):
        assert np.abs(np.asarray(dot) - np.asarray(splash)).max() < 2e-3 * np.abs(np.asarray(dot)).max()


@pytest.mark.parametrize(
    ("length", "dim", "wanted", "side"), [(4096, 256, None, 512), (4096, 512, None, 512), (3072, 256, 1024, 1024), (640, 512, 256, 128)]
)
def test_splash_blocks_divide_the_row(length: int, dim: int, wanted: int | None, side: int) -> None:
    assert block_size(length, dim, wanted) == side


def test_rows_that_no_block_divides_are_refused() -> None:
    with pytest.raises(ModelError, match="rows of 1000 tokens: splash attention wants a multiple of 128"):
        block_size(1000, 256)


def test_every_remat_policy_gives_the_same_gradients(short_gemma: Path) -> None:
    batch = documents((40, 20), 64, rows=4)
    found = {}
    for remat in KEPT:
        with make_mesh(4, 2) as mesh, jax.default_matmul_precision("highest"):
            model = build_model(short_gemma, mesh, "float32", LoraConfig(rank=4, alpha=8), remat=remat)
            graph, adapter, rest = nnx.split(model, nnx.LoRAParam, ...)
            loss = jax.value_and_grad(lambda a, graph=graph, rest=rest: next_token_loss(nnx.merge(graph, a, rest), **batch)[0])
            value, gradients = jax.jit(loss)(adapter)
            found[remat] = (float(value), [np.asarray(g) for g in jax.tree.leaves(gradients)])
    reference_value, reference = found["none"]
    assert sum(float(np.abs(g).sum()) for g in reference) > 0
    norm = np.sqrt(sum(float(np.square(g).sum()) for g in reference))
    for remat, (value, gradients) in found.items():
        difference = np.sqrt(sum(float(np.square(a - b).sum()) for a, b in zip(reference, gradients, strict=True)))
        print(f"{remat}: loss {value:.6f}, gradients differ by {difference / norm:.1e}")
        assert value == pytest.approx(reference_value, rel=1e-6)
        assert difference <= 1e-4 * norm


@pytest.mark.parametrize(
    ("wanted", "platform", "length", "kernel"),
    [
        ("auto", "tpu", 4096, "splash"),
        ("auto", "tpu", 240, "dot"),
        ("auto", "cpu", 4096, "dot"),
        ("auto", "cuda", 4096, "dot"),
        ("splash", "cpu", 128, "splash"),
        ("dot", "tpu", 4096, "dot"),
    ],
)
def test_the_kernel_follows_platform_and_row(wanted: str, platform: str, length: int, kernel: str) -> None:
    assert pick_kernel(wanted, platform, length, text_config("gemma4-31b")) == kernel

"""The chunked loss and the step against Optax on whole logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from gemma_ray.training import loss as loss_module
from gemma_ray.training.build import build_model
from gemma_ray.training.config import LoraConfig
from gemma_ray.training.loss import targets_and_weights
from gemma_ray.training.sharding import make_mesh
from gemma_ray.training.step import train_step

summed_cross_entropy: Any = loss_module.summed_cross_entropy


def plain(hidden: Any, table: Any, targets: Any, weights: Any, softcap: float | None) -> Any:
    logits = jnp.einsum("btd,vd->btv", hidden, table)
    capped = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    return (optax.softmax_cross_entropy_with_integer_labels(capped, targets) * weights).sum()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("length", [64, 60, 61])
def test_value_and_both_gradients_are_those_of_whole_logits(softcap: float | None, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK", 16)
    random = np.random.default_rng(0)
    hidden = random.normal(size=(3, length, 8)).astype(np.float32)
    table = random.normal(size=(50, 8)).astype(np.float32)
    targets = random.integers(0, 50, (3, length)).astype(np.int32)
    weights = (random.random((3, length)) < 0.4).astype(np.float32)
    scopes = random.integers(-1, 3, (3, length)).astype(np.int8)
    inputs = (hidden, table, targets, weights)
    with jax.default_matmul_precision("highest"):
        for arguments in ((0,), (1,), (0, 1)):
            both: Any = jax.jit(jax.value_and_grad(lambda *a: 2.5 * summed_cross_entropy(*a, scopes, softcap)[0], arguments))
            found = both(*inputs)
            expected = jax.value_and_grad(lambda h, t, y, w: 2.5 * plain(h, t, y, w, softcap), arguments)(*inputs)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
        total, by_scope = summed_cross_entropy(*inputs, scopes, softcap)
        assert float(total) == pytest.approx(float(plain(*inputs, softcap)))
        for scope in range(3):
            expected = plain(hidden, table, targets, (scopes >= scope).astype(np.float32), softcap)
            assert float(by_scope[scope]) == pytest.approx(float(expected), rel=1e-5)


def test_no_array_of_the_whole_batch_times_the_vocabulary_exists() -> None:
    batch, length, vocab = 2, 2048, 4096
    arguments = (jnp.zeros((batch, length, 8)), jnp.zeros((vocab, 8)), jnp.zeros((batch, length), jnp.int32), jnp.ones((batch, length)))
    scopes = jnp.zeros((batch, length), jnp.int8)
    compiled = jax.jit(jax.grad(lambda *a: summed_cross_entropy(*a, scopes, 30.0)[0])).lower(*arguments).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 4 * batch * length * vocab


def test_a_token_is_not_predicted_from_another_document_nor_past_the_row() -> None:
    tokens = jnp.array([[5, 6, 7, 8, 9, 0]])
    segments = jnp.array([[1, 1, 2, 2, 2, 0]])
    mask = jnp.array([[True, True, True, False, True, False]])
    targets, weights = targets_and_weights(tokens, mask, segments)
    assert targets[0, :5].tolist() == [6, 7, 8, 9, 0]
    # 5→6 bears loss; 6→7 crosses documents; 7→8 is masked; 8→9 bears loss; 9→padding; the last position predicts nothing
    assert weights[0].tolist() == [1, 0, 0, 1, 0, 0]


@pytest.fixture(scope="module")
def rows() -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    shape = (8, 32)
    segments = np.ones(shape, np.int32)
    segments[:, 20:] = 0
    mask = (random.random(shape) < np.linspace(0.1, 0.9, 8)[:, None]) & (segments > 0)  # parts of the batch bear loss unequally
    positions = np.broadcast_to(np.arange(32, dtype=np.int32), shape)
    tokens, scopes = random.integers(8, 1024, shape).astype(np.int32), random.integers(0, 3, shape).astype(np.int8)
    return {"tokens": tokens, "loss_mask": mask, "scopes": scopes, "positions": positions, "segments": segments}


def stepped(short_gemma: Path, rows: dict[str, np.ndarray], micro_batches: int, dtype: str = "float32") -> tuple[float, float, Any]:
    with make_mesh(4, 2) as mesh, jax.default_matmul_precision("highest"):
        model = build_model(short_gemma, mesh, dtype, LoraConfig(rank=4, alpha=8))
        optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.LoRAParam)
        value, counts, norm = nnx.jit(train_step, static_argnames="micro_batches")(model, optimizer, rows, micro_batches=micro_batches)
        assert int(counts["tokens"]) == 8 * 20
        return float(value), float(norm), jax.tree.map(np.asarray, nnx.state(model, nnx.LoRAParam))


def test_micro_batches_give_the_same_step_whatever_loss_tokens_each_has(short_gemma: Path, rows: dict[str, np.ndarray]) -> None:
    value, norm, adapter = stepped(short_gemma, rows, 1)
    value_2, norm_2, adapter_2 = stepped(short_gemma, rows, 2)
    assert (value_2, norm_2) == (pytest.approx(value, rel=1e-6), pytest.approx(norm, rel=1e-5))
    for one, two in zip(jax.tree.leaves(adapter), jax.tree.leaves(adapter_2), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=2e-5 * norm)


def test_an_adapter_is_fp32_beside_a_bfloat16_model(short_gemma: Path, rows: dict[str, np.ndarray]) -> None:
    value, norm, adapter = stepped(short_gemma, rows, 1, "bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(adapter)} == {np.dtype("float32")}
    reference, reference_norm, _ = stepped(short_gemma, rows, 1)
    assert (value, norm) == (pytest.approx(reference, rel=1e-2), pytest.approx(reference_norm, rel=0.1))

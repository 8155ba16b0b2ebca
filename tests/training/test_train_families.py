"""Each of Gemma 4's structures trains: the loss falls, and of the parameters only the adapter moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_gemma import FAMILIES, QUICKLY, SHORT, write_uneven_gemma

from gemma_ray.models.gemma4 import read_text_config
from gemma_ray.training.build import build_model, state_paths
from gemma_ray.training.config import LoraConfig
from gemma_ray.training.sharding import make_mesh, working_meshes
from gemma_ray.training.step import train_step


def batch_of(rows: int, length: int) -> dict[str, np.ndarray]:
    """Two documents a row, then padding."""
    cut, end = length // 2, length - 4
    place = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    segments = np.where(place < cut, 1, np.where(place < end, 2, 0)).astype(np.int32)
    tokens = np.random.default_rng(0).integers(8, 1024, (rows, length)).astype(np.int32)
    return {"tokens": tokens, "positions": place % cut, "segments": segments, "loss_mask": segments > 0}


@pytest.mark.parametrize("preset", FAMILIES)
def test_two_steps_lower_the_loss_and_leave_the_base_alone(preset: str, tmp_path: Path) -> None:
    folder = write_uneven_gemma(tmp_path / "model", preset, **SHORT[preset])
    shape = working_meshes(read_text_config(folder), 8, 8)[0]
    assert shape == ((8, 1) if preset.endswith("e2b") else (2, 4) if shape[1] == 4 else (4, 2))
    with make_mesh(*shape) as mesh:
        model = build_model(folder, mesh, "float32", LoraConfig(rank=4, alpha=8))
        optimizer = nnx.Optimizer(model, optax.adam(3e-2), wrt=nnx.LoRAParam)
        graph, state = nnx.split((model, optimizer))
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        state = jax.tree.map(lambda x: x if len(x.devices()) > 1 else jax.device_put(x, everywhere), state)  # step counters

        def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
            model, optimizer = nnx.merge(graph, state)
            loss, _, _ = train_step(model, optimizer, batch)
            return nnx.state((model, optimizer)), loss

        batch = batch_of(8, 24)
        shardings = (jax.tree.map(lambda x: x.sharding, state), None)
        compiled = jax.jit(step, out_shardings=shardings).lower(state, batch).compile(QUICKLY)
        trained, losses = state, []
        for _ in range(3):  # the third says what the second bought
            trained, loss = compiled(trained, batch)
            losses.append(float(loss))
    assert np.isfinite(losses).all()
    assert losses[0] > losses[1] > losses[2]
    before, after = (state_paths(nnx.state(nnx.merge(graph, s)[0], nnx.Param)) for s in (state, trained))
    moved = {path for path in before if not np.array_equal(before[path].get_value(), after[path].get_value())}
    assert moved == {path for path in before if "_lora_" in path}

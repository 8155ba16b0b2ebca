"""Each of Gemma 4's structures trains: the loss falls, of the parameters only the adapter moves, and a run goes on where it was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_gemma import FAMILIES, QUICKLY, SHORT, write_uneven_gemma

from gemma_ray.data.prepare import prepare_text
from gemma_ray.models.gemma4 import read_text_config
from gemma_ray.training.build import build_model, state_paths
from gemma_ray.training.checkpoints import read_checkpoint
from gemma_ray.training.config import LoraConfig, MeshConfig, TrainConfig
from gemma_ray.training.loop import TrainJob, train
from gemma_ray.training.metrics import read_metrics
from gemma_ray.training.sharding import make_mesh, working_meshes
from gemma_ray.training.step import train_step


def batch_of(rows: int, length: int) -> dict[str, np.ndarray]:
    """Two documents a row, then padding."""
    cut, end = length // 2, length - 4
    place = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    segments = np.where(place < cut, 1, np.where(place < end, 2, 0)).astype(np.int32)
    tokens = np.random.default_rng(0).integers(8, 1024, (rows, length)).astype(np.int32)
    return {
        "tokens": tokens,
        "positions": place % cut,
        "segments": segments,
        "loss_mask": segments > 0,
        "scopes": np.zeros_like(tokens, np.int8),
    }


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


@pytest.mark.slow
@pytest.mark.parametrize("preset", FAMILIES)
def test_a_run_of_two_halves_is_the_whole_run(preset: str, tmp_path: Path) -> None:
    model = write_uneven_gemma(tmp_path / "model", preset, **SHORT[preset])
    prepare_text(
        [f"module m{i} (input [{i}:0] a, output y);\n  assign y = ^a;\nendmodule\n" for i in range(40)], model, 32, tmp_path / "data"
    )
    fsdp, tp = working_meshes(read_text_config(model), 8, 8)[0]

    def run(out: str, steps: int) -> TrainJob:
        settings = {"steps": steps, "decay_steps": 4, "batch_size": 8, "learning_rate": 1e-2, "warmup_steps": 1, "checkpoint_every": 2}
        config = TrainConfig.model_validate({**settings, "tensorboard": False})
        lora = LoraConfig(rank=3, alpha=6, targets=("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"))
        job = TrainJob(model, tmp_path / "data", tmp_path / out, "float32", 32, MeshConfig(fsdp=fsdp, tp=tp), config, lora, {})
        train(job, lambda _: None)
        return job

    whole, _, halves = run("whole", 4), run("halves", 2), run("halves", 4)
    assert [m.loss for m in read_metrics(whole.metrics)] == [m.loss for m in read_metrics(halves.metrics)]
    expected, found = (read_checkpoint(job.checkpoints) for job in (whole, halves))
    assert (found.lora.rank, found.lora.alpha, found.step) == (3, 6, 4)
    assert expected.parameters.keys() == found.parameters.keys()
    assert all(np.array_equal(expected.parameters[name], found.parameters[name]) for name in expected.parameters)

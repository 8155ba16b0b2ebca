"""The same step on 2 hosts × 2 devices, 1 host × 4 devices and one device: real Ray placement, real JAX processes.

A run that was saved on one device goes on there, too, with the batches that it had yet to see.

The global batch is compared by content, because a wrong layout over processes is silent in Tunix: it trains on other rows and says nothing.
Loss and gradients are compared at fixed parameters (B of the adapter is not zero), in fp32.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_ray.data.prepare import prepare_text
from gemma_ray.data.source import batches
from gemma_ray.training.config import MeshConfig
from raycluster.session import connect
from raycluster.slices import Slice, resolve
from raycluster.trainer import run_spmd

ONE = resolve("cpu", emulate=True, devices_per_host=1)
ONE_HOST = resolve("v5p", "2x2x1", emulate=True)
TWO_HOSTS = resolve("v5p", "2x2x1", hosts=2, devices_per_host=2, emulate=True)
TOPOLOGIES: dict[str, tuple[Slice, MeshConfig]] = {
    "one device": (ONE, MeshConfig(fsdp=1, tp=1)),
    "1 host x 4 devices": (ONE_HOST, MeshConfig(fsdp=2, tp=2)),
    "2 hosts x 2 devices": (TWO_HOSTS, MeshConfig(fsdp=4, tp=1)),
    "2 hosts x 2 devices, tp over hosts": (TWO_HOSTS, MeshConfig(fsdp=2, tp=2)),
}


def program(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """`step` and, where asked for, `resumed` on each mesh, by topology; runs in every process."""
    found = {name: step(config["model"], config["data"], mesh) for name, mesh in config["meshes"].items()}
    for name in [name for name in config["resumed_on"] if name in found]:
        found[name]["resumed"] = resumed(config["job"], config["meshes"][name])
    return found


def loss_and_gradients(graph: Any, adapter: Any, rest: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """The mean loss of a batch on the mesh, and its gradients by the adapter, whole in every process."""
    import jax
    from flax import nnx
    from jax.experimental import multihost_utils

    from gemma_ray.training.loss import next_token_loss, targets_and_weights

    def loss(adapter: Any, rest: Any, batch: dict[str, Any]) -> Any:
        _, weights = targets_and_weights(batch["tokens"], batch["loss_mask"], batch["segments"])
        return next_token_loss(nnx.merge(graph, adapter, rest), **batch)[0] / weights.sum()

    value, gradients = jax.jit(jax.value_and_grad(loss))(adapter, rest, batch)
    gathered = multihost_utils.process_allgather(gradients, tiled=True)
    leaves = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(gathered)}
    return {"loss": float(value), "gradients": leaves}


def step(model_folder: Path, data: Path, shape: MeshConfig) -> dict[str, Any]:
    """Loss and LoRA gradients of the first global batch."""
    import jax
    from flax import nnx
    from jax.experimental import multihost_utils

    from gemma_ray.training.batches import check_same_batch, local_rows, place_batch
    from gemma_ray.training.build import build_model
    from gemma_ray.training.config import LoraConfig
    from gemma_ray.training.sharding import make_mesh

    mesh = make_mesh(shape.fsdp, shape.tp)
    batch, mine = (next(batches(data, batch_size=8, seq_len=48, seed=7, rows=rows)) for rows in (None, local_rows(mesh, 8)))
    with mesh, jax.default_matmul_precision("highest"):
        model = build_model(model_folder, mesh, "float32", LoraConfig(rank=4, alpha=8), seed=3)
        graph, lora, rest = nnx.split(model, nnx.LoRAParam, ...)
        # B starts at zero, where A has no gradient: give both the same fixed values on every topology.
        lora = jax.tree.map(lambda x: jax.jit(lambda v: v + 0.01, out_shardings=x.sharding)(x), lora)
        placed = place_batch(mine, mesh, 8)
        check_same_batch(batch, placed)
        found = loss_and_gradients(graph, lora, rest, placed)
        tokens = multihost_utils.process_allgather(placed["tokens"], tiled=True)
    return {**found, "tokens": np.asarray(tokens), "processes": jax.process_count()}


def resumed(fields: dict[str, Any], shape: MeshConfig) -> dict[str, Any]:
    """The next batches of a run that was saved elsewhere, and the loss and gradients of the first at its adapter."""
    import jax
    from flax import nnx
    from jax.experimental import multihost_utils

    from gemma_ray.training.build import build_model
    from gemma_ray.training.loop import TrainJob
    from gemma_ray.training.sharding import make_mesh
    from gemma_ray.training.trainer import Trainer

    job = TrainJob(**fields, mesh=shape)
    mesh = make_mesh(job.mesh.fsdp, job.mesh.tp)
    with mesh, jax.default_matmul_precision("highest"):
        model = build_model(job.model, mesh, job.dtype, job.lora, job.train.seed)
        trainer = Trainer(model, job, mesh, lambda report: None)
        trainer.jit_train_and_eval_step()
        graph, lora, rest = nnx.split(trainer.model, nnx.LoRAParam, ...)
        batches = [batch for _ in range(3) if (batch := trainer.next_batch())]
        found = loss_and_gradients(graph, lora, rest, batches[0])
        tokens = [np.asarray(multihost_utils.process_allgather(batch["tokens"], tiled=True)) for batch in batches]
    return {**found, "tokens": tokens, "step": trainer.resumed_from}


SAVED_AT = 4
RESUMED_ON = ("one device", "2 hosts x 2 devices")


def saved_run(model: Path, folder: Path) -> dict[str, Any]:
    """A run of four steps in this process; fields of a job that goes on from there."""
    from gemma_ray.training.config import LoraConfig, TrainConfig
    from gemma_ray.training.loop import TrainJob, train

    settings = {"batch_size": 8, "learning_rate": 1e-2, "warmup_steps": 0, "checkpoint_every": SAVED_AT, "seed": 7, "tensorboard": False}
    fields: dict[str, Any] = {"model": model, "data": folder / "data", "out": folder / "run", "dtype": "float32", "seq_len": 48}
    fields |= {"lora": LoraConfig(rank=4, alpha=8), "made_from": {}}
    short = TrainConfig.model_validate({**settings, "steps": SAVED_AT, "decay_steps": 20})
    train(TrainJob(**fields, train=short, mesh=MeshConfig(fsdp=4, tp=2)), lambda _: None)
    return {**fields, "train": TrainConfig.model_validate({**settings, "steps": 20})}


@pytest.fixture(scope="module")
def results(short_gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    folder = tmp_path_factory.mktemp("topologies")
    texts = [f"module m{i} (input [{i}:0] a, output y);\n  assign y = ^a;\nendmodule\n" for i in range(80)]
    prepare_text(texts, short_gemma, 48, folder / "data")
    found, job = {}, saved_run(short_gemma, folder)
    config = {"model": short_gemma, "data": folder / "data", "job": job, "resumed_on": RESUMED_ON}
    for hardware in (ONE, ONE_HOST, TWO_HOSTS):
        meshes = {name: mesh for name, (slice, mesh) in TOPOLOGIES.items() if slice == hardware}
        with connect(hardware):
            found |= run_spmd(program, {**config, "meshes": meshes}, hardware, name="step", storage=folder / "ray")
    return {name: {**result, "data": folder / "data"} for name, result in found.items()}


def test_every_topology_has_its_processes(results: dict[str, dict[str, Any]]) -> None:
    assert [result["processes"] for result in results.values()] == [1, 1, 2, 2]


def relative_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Relative L2 of the gradients."""
    assert one["gradients"].keys() == other["gradients"].keys()
    difference = np.sqrt(sum(np.sum((one["gradients"][k] - other["gradients"][k]).astype(np.float64) ** 2) for k in one["gradients"]))
    norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in one["gradients"].values()))
    assert norm > 0
    return float(difference / norm)


OTHERS = [name for name in TOPOLOGIES if name != "one device"]


@pytest.mark.parametrize("name", OTHERS)
def test_batch_loss_and_gradients_are_those_of_one_device(results: dict[str, dict[str, Any]], name: str) -> None:
    one, other = results["one device"], results[name]
    assert np.array_equal(one["tokens"], other["tokens"])
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    difference = relative_difference(one, other)
    print(f"{name}: loss {other['loss']:.6f}, relative L2 of the gradients {difference:.1e}")
    assert difference <= 1e-4


@pytest.mark.parametrize("name", RESUMED_ON)
def test_a_run_that_was_saved_elsewhere_goes_on_with_the_batches_it_had_not_seen(results: dict[str, dict[str, Any]], name: str) -> None:
    one, other = results["one device"]["resumed"], results[name]["resumed"]
    assert other["step"] == SAVED_AT
    data = batches(results[name]["data"], batch_size=8, seq_len=48, seed=7)
    expected = [next(data)["tokens"] for _ in range(SAVED_AT + 3)][SAVED_AT:]
    assert all(np.array_equal(a, b) for a, b in zip(expected, other["tokens"], strict=True))
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    difference = relative_difference(one, other)
    print(f"{name}: resumed at step {SAVED_AT}, relative L2 of the gradients {difference:.1e}")
    assert difference <= 1e-4

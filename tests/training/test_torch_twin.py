"""The PyTorch trainer: the rows, schedule and losses of the JAX trainer, and checkpoints that go on to the bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from twin_rows import LENGTH, documents, write_rows

from gemma_ray.errors import CheckpointError, ModelError, RecipeError, StageError
from gemma_ray.models.gemma4 import read_text_config
from gemma_ray.models.parameter_map import gemma4_rows
from gemma_ray.training.config import LoraConfig, MeshConfig, TrainConfig
from gemma_ray.training.loop import TrainJob, train
from gemma_ray.training.loss import targets_and_weights
from gemma_ray.training.metrics import read_metrics
from gemma_ray.training.optimizer import learning_rate_schedule
from gemma_ray.training.torch_arguments import learning_rate
from gemma_ray.training.torch_checkpoints import newest_whole
from gemma_ray.training.torch_data import IGNORED, labels_of
from gemma_ray.training.torch_job import TorchJob, TorchResult, check_torch
from gemma_ray.training.torch_model import ADAPTER, build_adapted, load_base
from gemma_ray.training.torch_twin import train_torch

SAME_A = LoraConfig(rank=4, alpha=8, targets=("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
"""Targets for which both engines have the same parameters: Tunix has one A for k_proj and v_proj, PEFT two."""


class Dropped(LoraConfig):
    """An adapter with dropout, so that a resumed run has to continue the random numbers too."""

    dropout: float = 0.1


def silent(report: dict[str, Any]) -> None:
    del report


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """PyTorch's threads wait for each other by spinning: where others compute too, two take longer than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "data")


def torch_job(model: Path, data: Path, out: Path, steps: int = 6, lora: LoraConfig = SAME_A, **settings: Any) -> TorchJob:
    defaults = {"engine": "torch", "batch_size": 8, "learning_rate": 1e-3, "warmup_steps": 2, "checkpoint_every": 3}
    config = TrainConfig.model_validate({"steps": steps, **defaults, **settings})
    return TorchJob(model, data, out, "float32", LENGTH, MeshConfig(), config, lora, made_from={"data": "these inputs"})


def losses(out: Path) -> list[float]:
    return [m.loss for m in read_metrics(out / "metrics.jsonl")]


# ---- rows, labels, schedule


def test_documents_of_a_packed_row_do_not_see_each_other(tiny_gemma: Path) -> None:
    model = load_base(tiny_gemma, "float32")
    lengths, padding = [180, 90, 1, 20], 9  # the first is longer than the sliding window of 128
    rng = np.random.default_rng(0)
    alone = [torch.tensor(document.ids.astype(np.int64))[None] for document in documents(lengths, rng)]
    row = torch.nn.functional.pad(torch.cat(alone, 1), (0, padding))
    positions = torch.cat([*(torch.arange(n) for n in lengths), torch.zeros(padding, dtype=torch.long)])[None]
    with torch.no_grad():
        packed = torch.log_softmax(model(input_ids=row, position_ids=positions).logits[0], -1)
        start = 0
        for ids in alone:
            expected = torch.log_softmax(model(input_ids=ids).logits[0], -1)
            found = packed[start : start + ids.shape[1]]
            at = (torch.arange(ids.shape[1] - 1), ids[0, 1:])
            assert torch.allclose(found[:-1][at], expected[:-1][at], atol=1e-5, rtol=0)
            start += ids.shape[1]
        continued = torch.log_softmax(model(input_ids=row[:, : sum(lengths)]).logits[0], -1)
    assert (continued[lengths[0] :] - packed[lengths[0] : sum(lengths)]).abs().max() > 0.1  # it matters


def test_labels_are_the_jax_trainers_targets_moved_to_the_token_itself() -> None:
    rng = np.random.default_rng(1)
    segments = np.sort(rng.integers(0, 4, (16, LENGTH)), 1)[:, ::-1].astype(np.int32)
    batch: dict[str, np.ndarray] = {"tokens": rng.integers(5, 99, (16, LENGTH)).astype(np.int32), "segments": segments}
    batch["loss_mask"] = (rng.random((16, LENGTH)) < 0.5) & (segments > 0)
    targets, weights = (np.asarray(x) for x in targets_and_weights(batch["tokens"], batch["loss_mask"], segments))  # type: ignore[arg-type]
    assert np.array_equal(labels_of(batch)[:, 1:], np.where(weights > 0, targets, IGNORED)[:, :-1])
    assert (labels_of(batch)[:, 0] == IGNORED).all()


@pytest.mark.parametrize(("steps", "warmup"), [(770, 100), (7, 0), (3, 9), (1, 0)])
def test_the_schedule_is_that_of_the_jax_trainer_at_every_step(steps: int, warmup: int) -> None:
    config = TrainConfig(steps=steps, warmup_steps=warmup)
    expected = np.asarray(learning_rate_schedule(config)(np.arange(steps)))
    found = [learning_rate(config, step) for step in range(steps)]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=config.learning_rate * 1e-6)


# ---- the oracle: the JAX trainer


def jax_adapter(model: Path, lora: LoraConfig, seed: int, out: Path) -> Path:
    """A folder with the JAX trainer's initial adapter under PEFT's names."""
    from flax import nnx

    from gemma_ray.training.build import build_model, state_paths
    from gemma_ray.training.sharding import make_mesh

    mesh = make_mesh(4, 2)
    with mesh:
        state = nnx.state(build_model(model, mesh, "float32", lora, seed), nnx.LoRAParam)
    values = {path: np.asarray(v.get_value()) for path, v in state_paths(state).items()}
    tensors = {}
    for row in gemma4_rows(read_text_config(model)):
        a, b = row.lora_names()
        if a in values:
            name = f"base_model.model.model.{row.hf[0].removesuffix('.weight')}"
            rank = lora.rank
            tensors[f"{name}.lora_A.weight"] = np.ascontiguousarray(values[a].reshape(-1, rank).T)  # [in…, rank]
            tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray(values[b].reshape(rank, -1).T)  # [rank, out…]
    assert len(tensors) == len(values)
    out.mkdir()
    save_file(tensors, out / ADAPTER, metadata={"format": "pt"})
    return out


def test_it_trains_as_the_jax_trainer_does(short_gemma: Path, data: Path, tmp_path: Path) -> None:
    settings = {"weight_decay": 0.1, "clip_norm": 1.0, "micro_batches": 2}
    twin = torch_job(short_gemma, data, tmp_path / "torch", 10, **settings)
    config = twin.train.model_copy(update={"engine": "jax", "micro_batches": 1})
    ours = TrainJob(
        short_gemma, data, tmp_path / "jax", "float32", LENGTH, MeshConfig(fsdp=4, tp=2), config, SAME_A, {},
    )  # fmt: skip
    train(ours, silent)
    train_torch(replace(twin, initial_adapter=jax_adapter(short_gemma, SAME_A, config.seed, tmp_path / "start")), silent)
    expected, found = read_metrics(ours.metrics), read_metrics(twin.metrics)
    assert [m.loss_tokens for m in found] == [m.loss_tokens for m in expected]
    assert expected[-1].loss < expected[0].loss
    for key in ("loss", "grad_norm", "learning_rate"):
        np.testing.assert_allclose([getattr(m, key) for m in found], [getattr(m, key) for m in expected], rtol=1e-4, atol=1e-9, err_msg=key)


# ---- a run


@pytest.fixture(scope="module")
def straight(short_gemma: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps without interruption, with dropout."""
    out = tmp_path_factory.mktemp("straight")
    assert train_torch(torch_job(short_gemma, data, out, lora=Dropped(rank=4, alpha=8)), silent).resumed_from == 0
    return out


def again(short_gemma: Path, data: Path, out: Path, **changes: Any) -> TorchJob:
    return replace(torch_job(short_gemma, data, out, lora=Dropped(rank=4, alpha=8)), **changes)


class KilledError(Exception):
    pass


def test_a_resumed_run_is_the_uninterrupted_run_to_the_last_bit(short_gemma: Path, data: Path, straight: Path, tmp_path: Path) -> None:
    def stop_after_4(report: dict[str, Any]) -> None:
        if report["step"] == 4:
            raise KilledError

    with pytest.raises(KilledError):
        train_torch(again(short_gemma, data, tmp_path), stop_after_4)
    reports: list[dict[str, Any]] = []
    assert train_torch(again(short_gemma, data, tmp_path), reports.append).resumed_from == 3
    assert losses(tmp_path) == losses(straight)
    assert [report["step"] for report in reports] == [4, 5, 6]
    assert set(reports[0]) == {"step", "steps", "loss", "tokens_per_s"}
    for name in (ADAPTER, "optimizer.safetensors", "random.safetensors"):
        assert (tmp_path / "checkpoints/6" / name).read_bytes() == (straight / "checkpoints/6" / name).read_bytes()


def test_a_checkpoint_is_an_adapter_that_peft_reads(short_gemma: Path, straight: Path) -> None:
    folder = straight / "checkpoints" / "6"
    model = PeftModel.from_pretrained(load_base(short_gemma, "float32"), folder)
    saved = load_file(folder / ADAPTER)
    read = {name.replace(".default", ""): p for name, p in model.named_parameters() if "lora_" in name}
    assert saved.keys() == read.keys()
    assert all(np.array_equal(saved[name], read[name].detach().numpy()) for name in saved)
    assert json.loads((folder / "state.json").read_text())["data"] == {"next_index": 6}


def test_a_finished_run_is_left_as_it_is(short_gemma: Path, data: Path, straight: Path) -> None:
    before = (straight / "metrics.jsonl").read_bytes()
    assert train_torch(again(short_gemma, data, straight), silent) == TorchResult(6, losses(straight)[-1], 6)
    assert (straight / "metrics.jsonl").read_bytes() == before


def test_only_as_many_checkpoints_are_kept_as_asked(short_gemma: Path, data: Path, tmp_path: Path) -> None:
    train_torch(torch_job(short_gemma, data, tmp_path, 5, checkpoint_every=1, keep_checkpoints=2), silent)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["4", "5"]


def test_micro_batches_and_recomputed_layers_change_nothing(short_gemma: Path, data: Path, tmp_path: Path) -> None:
    for name, settings in {"plain": {}, "parts": {"micro_batches": 4, "remat": "layer"}}.items():
        train_torch(torch_job(short_gemma, data, tmp_path / name, 3, **settings), silent)
    np.testing.assert_allclose(losses(tmp_path / "parts"), losses(tmp_path / "plain"), rtol=1e-5)


def test_adapters_are_fp32_on_a_bfloat16_base(short_gemma: Path, data: Path, tmp_path: Path) -> None:
    train_torch(replace(torch_job(short_gemma, data, tmp_path, 2), dtype="bfloat16"), silent)
    with safe_open(tmp_path / "checkpoints" / "2" / ADAPTER, "np") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F32"}  # noqa: SIM118 - safe_open is no dict
    assert {p.dtype for p in load_base(short_gemma, "bfloat16").parameters()} == {torch.bfloat16}


def test_a_loss_that_is_not_finite_stops_before_it_is_saved(short_gemma: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"the loss is (nan|inf) at step .*lower train\.learning_rate"):
        train_torch(torch_job(short_gemma, data, tmp_path, 9, learning_rate=9e15, warmup_steps=0, checkpoint_every=9), silent)
    assert not list((tmp_path / "checkpoints").iterdir())


# ---- checkpoints that are no use


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


def one_bit(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: cut(folder / ADAPTER), ADAPTER),
        (lambda folder: one_bit(folder / "optimizer.safetensors"), "optimizer"),
        (lambda folder: (folder / "random.safetensors").unlink(), "cannot be read"),
        (lambda folder: cut(folder / "state.json"), "cannot be read"),
        (lambda folder: (folder / "state.json").write_text("{}"), "not a whole checkpoint"),
    ],
)
def test_damage_of_any_file_is_seen(straight: Path, tmp_path: Path, damage: Callable[[Path], None], named: str) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(straight / "checkpoints", folder)
    damage(folder / "6")
    found = newest_whole(folder, {"data": "these inputs"}, 6)
    assert (found.folder, found.step) == (folder / "3", 3)
    assert named in found.damaged[0]


def test_from_a_damaged_newest_checkpoint_it_falls_back_to_the_one_before_and_says_so(
    short_gemma: Path, data: Path, straight: Path, tmp_path: Path
) -> None:
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    cut(tmp_path / "checkpoints" / "6" / ADAPTER)
    reports: list[dict[str, Any]] = []
    assert train_torch(again(short_gemma, data, tmp_path), reports.append).resumed_from == 3
    assert reports[0]["note"].endswith("6/adapter_model.safetensors: not the bytes that were saved; going on from step 3")
    assert losses(tmp_path) == losses(straight)
    assert train_torch(again(short_gemma, data, tmp_path), silent).resumed_from == 6


def test_with_none_whole_nothing_starts_anew_in_silence(short_gemma: Path, data: Path, straight: Path, tmp_path: Path) -> None:
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    for step in ("3", "6"):
        cut(tmp_path / "checkpoints" / step / ADAPTER)
    with pytest.raises(CheckpointError, match=r"6/adapter_model.*no older one; remove .*checkpoints to train anew"):
        train_torch(again(short_gemma, data, tmp_path), silent)


def test_checkpoints_of_other_inputs_or_of_more_steps_are_refused(short_gemma: Path, data: Path, straight: Path) -> None:
    with pytest.raises(CheckpointError, match="step 6 was trained otherwise: data was another"):
        train_torch(again(short_gemma, data, straight, made_from={"data": "other inputs"}), silent)
    with pytest.raises(CheckpointError, match=r"holds step 6, and train\.steps is 3"):
        train_torch(torch_job(short_gemma, data, straight, 3), silent)


def test_an_adapter_of_another_rank_is_named(short_gemma: Path, data: Path, straight: Path, tmp_path: Path) -> None:
    other = replace(torch_job(short_gemma, data, tmp_path), lora=LoraConfig(rank=5), initial_adapter=straight / "checkpoints" / "6")
    with pytest.raises(CheckpointError, match="not an adapter of this recipe's lora"):
        train_torch(other, silent)


# ---- what is refused, and official files


@pytest.mark.parametrize(
    ("settings", "mesh", "message"),
    [
        ({}, MeshConfig(fsdp=1, tp=2), r"mesh\.tp = 2: .*set mesh\.tp=1 and mesh\.fsdp=2"),
        ({}, MeshConfig(fsdp=4), r"mesh\.fsdp = 4: .*one process on each of 2 devices; set it to 2"),
        ({"batch_size": 6, "micro_batches": 2}, MeshConfig(fsdp=2), r"train\.batch_size = 6 .*multiple of 4"),
        ({"mode": "full"}, MeshConfig(fsdp=2), r"train\.mode = full"),
        ({"remat": "norms"}, MeshConfig(fsdp=2), r"train\.remat = norms: .*layer or none"),
        ({"attention": "splash"}, MeshConfig(fsdp=2), r"train\.attention = splash"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_key(settings: dict[str, Any], mesh: MeshConfig, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_torch(TrainConfig.model_validate({"engine": "torch", "batch_size": 4, **settings}), mesh, 2)


def test_official_multimodal_files_give_the_same_text_model(short_gemma: Path, tmp_path: Path) -> None:
    tensors = load_file(short_gemma / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    whole = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "text_config": read_text_config(short_gemma)}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    save_file({**renamed, "model.vision_tower.x.weight": np.ones((2, 2), np.float32)}, tmp_path / "model.safetensors", {"format": "pt"})
    found, expected = (load_base(folder, "float32").state_dict() for folder in (tmp_path, short_gemma))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    del renamed["model.language_model.layers.1.mlp.up_proj.weight"]
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 parameters are in no file, the first: model\.layers\.1\.mlp\.up_proj"):
        load_base(tmp_path, "float32")


def test_every_target_of_every_layer_is_adapted(short_gemma: Path) -> None:
    model = build_adapted(load_base(short_gemma, "float32"), LoraConfig(rank=2), seed=0)
    adapted = {name.split(".lora_A")[0].removeprefix("base_model.model.") for name, _ in model.named_parameters() if "lora_A" in name}
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    projections = {
        name for name, module in load_base(short_gemma, "float32").named_modules() if name.endswith(kinds) and hasattr(module, "weight")
    }
    assert adapted == projections

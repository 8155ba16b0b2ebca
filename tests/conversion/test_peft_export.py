"""Merging a PEFT checkpoint: the numbers of PEFT's own merge, and what does not fit is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

from gemma_ray.conversion.config import ConvertConfig
from gemma_ray.conversion.peft_export import export_peft, is_peft
from gemma_ray.errors import CheckpointError
from gemma_ray.training.config import LoraConfig
from gemma_ray.training.torch_checkpoints import save_adapter
from gemma_ray.training.torch_model import ADAPTER, build_adapted, load_base, trained


class Stabilised(LoraConfig):
    """Rank-stabilised LoRA: scaled by alpha / sqrt(rank)."""

    rslora: bool = True


@pytest.fixture(scope="module", params=[LoraConfig(rank=4, alpha=8), Stabilised(rank=4, alpha=8)], ids=["lora", "rslora"])
def checkpoint(request: pytest.FixtureRequest, tiny_gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter whose B is not zero, as step 7."""
    folder = tmp_path_factory.mktemp("checkpoints") / "7"
    folder.mkdir()
    model = build_adapted(load_base(tiny_gemma, "float32"), request.param, seed=0)
    with torch.no_grad():
        for p in trained(model).values():
            p.normal_(std=0.1)
    save_adapter(folder, model, {name: p.detach() for name, p in trained(model).items()})
    return folder


def test_the_merged_weights_are_those_of_peft(tiny_gemma: Path, checkpoint: Path, tmp_path: Path) -> None:
    assert is_peft(checkpoint)
    done = export_peft(tiny_gemma, checkpoint, tmp_path / "model", ConvertConfig(max_shard_bytes=2_000_000))
    assert (done.step, done.changed) == (7, 41)
    assert done.files > 1
    merged = PeftModel.from_pretrained(load_base(tiny_gemma, "float32"), checkpoint).merge_and_unload()  # type: ignore[operator]
    found = load_base(tmp_path / "model", "float32").state_dict()
    base = load_torch(tiny_gemma / "model.safetensors")
    for name, tensor in merged.state_dict().items():
        assert torch.allclose(found[name], tensor, atol=1e-6), name
        if name.endswith("norm.weight"):
            assert torch.equal(found[name], base[name])


def test_the_folder_has_what_serving_needs(tiny_gemma: Path, checkpoint: Path, tmp_path: Path) -> None:
    export_peft(tiny_gemma, checkpoint, tmp_path / "model", ConvertConfig())
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "model" / name).read_bytes() == (tiny_gemma / name).read_bytes()


def test_a_damaged_checkpoint_is_named(tiny_gemma: Path, checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "7"
    shutil.copytree(checkpoint, broken)
    (broken / ADAPTER).write_bytes((broken / ADAPTER).read_bytes()[:60])
    with pytest.raises(CheckpointError, match=r"7: cannot be read .*remove it to use an older one"):
        export_peft(tiny_gemma, broken, tmp_path / "model", ConvertConfig())
    assert not (tmp_path / "model").exists()


def test_an_adapter_of_another_model_is_refused(tiny_gemma: Path, checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    other = tmp_path / "7"
    shutil.copytree(checkpoint, other)
    tensors = load_file(other / ADAPTER)
    name = next(name for name in tensors if name.endswith("layers.0.mlp.up_proj.lora_A.weight"))
    save_file({**tensors, name: np.ones((4, 3), np.float32)}, other / ADAPTER)
    with pytest.raises(CheckpointError, match=r"up_proj.*\[512, 3\], the base has \[512, 128\]"):
        export_peft(tiny_gemma, other, tmp_path / "model", ConvertConfig())
    save_file({key.replace("layers.0.", "layers.77."): t for key, t in tensors.items()}, other / ADAPTER)
    with pytest.raises(CheckpointError, match=r"adapts 7 tensors that this base has not, the first: layers\.77"):
        export_peft(tiny_gemma, other, tmp_path / "model", ConvertConfig())

"""Export and verification: merged weights worked out another way, and logits by transformers; a wrong tensor is found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gemma_ray.conversion.config import ConvertConfig
from gemma_ray.conversion.export import export
from gemma_ray.conversion.verify import verify
from gemma_ray.data.prepare import prepare_text
from gemma_ray.errors import CheckpointError, ModelError
from gemma_ray.models.tiny import write_initial_model
from gemma_ray.training.checkpoints import read_checkpoint
from gemma_ray.training.config import LoraConfig, MeshConfig, TrainConfig
from gemma_ray.training.loop import TrainJob, train

RANK, ALPHA = 4, 8.0
PROMPTS = [[2, 4, 300, 301, 302, 5], [2, 270, 280, 290]]


@pytest.fixture(scope="module")
def trained(tiny_gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two LoRA steps; `B` is no longer zero."""
    out = tmp_path_factory.mktemp("trained")
    prepare_text([f"module m{i};\nendmodule\n" for i in range(80)], tiny_gemma, 32, out / "data")
    settings = TrainConfig(steps=2, batch_size=8, learning_rate=5e-2, warmup_steps=0, checkpoint_every=2)
    lora, mesh = LoraConfig(rank=RANK, alpha=ALPHA), MeshConfig(fsdp=4, tp=2)
    job = TrainJob(tiny_gemma, out / "data", out, "float32", 32, mesh, settings, lora, {})
    train(job, lambda report: None)
    return out / "checkpoints"


@pytest.fixture(scope="module")
def exported(tiny_gemma: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "model"
    done = export(tiny_gemma, trained, out, ConvertConfig(max_shard_bytes=2_000_000))
    assert (done.step, done.changed) == (2, 41)  # 7 projections a layer, 6 in the global layer that has no v_proj
    assert done.files > 1
    return out


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def greedy(model: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy tokens without a KV cache, one forward pass a token: another road to what `generate` gives."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    continuations = []
    for prompt in prompts:
        row = list(prompt)
        for _ in range(new_tokens):
            with torch.no_grad():
                row.append(int(loaded(torch.tensor([row]), use_cache=False).logits[0, -1].argmax()))
            if row[-1] in (1, 5):
                break
        continuations.append(row[len(prompt) :])
    return continuations


def test_merged_weights_are_the_base_plus_ba_worked_out_head_by_head(tiny_gemma: Path, trained: Path, exported: Path) -> None:
    base, merged, lora = tensors(tiny_gemma), tensors(exported), read_checkpoint(trained).parameters
    scale = ALPHA / RANK
    a, b = lora["layers.0.attn.kv_einsum.w_lora_a"], lora["layers.0.attn.kv_einsum.w_lora_b"]  # [d, r], [r, 2, k, h]
    for which, name in enumerate(("k_proj", "v_proj")):
        full = f"model.layers.0.self_attn.{name}.weight"
        for head in range(b.shape[2]):
            rows = slice(head * b.shape[3], (head + 1) * b.shape[3])
            expected = base[full][rows] + scale * (a @ b[:, which, head]).T
            assert np.allclose(merged[full][rows], expected, atol=1e-6)
            assert np.abs(merged[full][rows] - base[full][rows]).max() > 1e-4
    a, b = lora["layers.5.attn.attn_vec_einsum.w_lora_a"], lora["layers.5.attn.attn_vec_einsum.w_lora_b"]  # [n, h, r], [r, d]
    full = "model.layers.5.self_attn.o_proj.weight"
    assert np.allclose(merged[full], base[full] + scale * (a.reshape(-1, RANK) @ b).T, atol=1e-6)


def test_what_training_does_not_touch_is_copied_bit_for_bit(tiny_gemma: Path, exported: Path) -> None:
    base, merged = tensors(tiny_gemma), tensors(exported)
    assert base.keys() == merged.keys()
    for name in base:
        if "_proj" not in name:
            assert np.array_equal(base[name], merged[name]), name
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (exported / name).read_bytes() == (tiny_gemma / name).read_bytes()


def test_the_index_lists_every_tensor_in_its_file(exported: Path) -> None:
    index = json.loads((exported / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {name: path.name for path in exported.glob("*.safetensors") for name in load_file(path)}


def test_a_right_export_passes_and_one_swapped_head_fails(tiny_gemma: Path, trained: Path, exported: Path, tmp_path: Path) -> None:
    config = ConvertConfig(verify_prompts=2, verify_new_tokens=6)
    found = verify(tiny_gemma, trained, exported, PROMPTS, config, greedy)
    assert found.passed, found.summary()
    assert found.max_abs_logit_diff < 1e-3
    assert (found.tensors_changed, found.prompts) == (41, 2)

    wrong = tmp_path / "wrong"
    shutil.copytree(exported, wrong)
    index = json.loads((wrong / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.2.self_attn.q_proj.weight"
    content = load_file(wrong / index[name])
    content[name] = np.concatenate([content[name][32:64], content[name][:32], content[name][64:]])
    save_file(content, wrong / index[name], metadata={"format": "pt"})
    broken = verify(tiny_gemma, trained, wrong, PROMPTS, config, greedy)
    assert not broken.passed
    assert broken.max_abs_logit_diff > 1e-3


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_written(trained: Path, tmp_path: Path) -> None:
    from gemma_ray.models.gemma4 import PRESETS

    other = tmp_path / "other"
    other.mkdir()
    sizes = PRESETS["gemma4-tiny"]
    try:
        PRESETS["gemma4-tiny"] = {**sizes, "hidden_size": 64}
        write_initial_model("gemma4-tiny", other, seed=0)
    finally:
        PRESETS["gemma4-tiny"] = sizes
    with pytest.raises((CheckpointError, ModelError)):
        export(other, trained, tmp_path / "out", ConvertConfig())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other"]


def test_a_damaged_export_is_named_before_other_programs_read_it(tiny_gemma: Path, trained: Path, exported: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(exported, broken)
    path = sorted(broken.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=rf"{path.name}: not a whole safetensors file"):
        verify(tiny_gemma, trained, broken, PROMPTS, ConvertConfig(), greedy)
    path.unlink()
    with pytest.raises(ModelError, match="tensors are missing"):
        verify(tiny_gemma, trained, broken, PROMPTS, ConvertConfig(), greedy)

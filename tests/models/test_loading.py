"""Base weights: a Tunix model filled from Hugging Face files computes what transformers computes from them; every gap is an error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gemma_ray.errors import ModelError
from gemma_ray.models.fingerprint import model_fingerprint
from gemma_ray.models.gemma4 import read_text_config
from gemma_ray.models.loading import TensorFiles, check_complete
from gemma_ray.models.parameter_map import LAYOUTS, gemma4_rows
from gemma_ray.training.build import build_model
from gemma_ray.training.sharding import make_mesh


def rewritten(source: Path, target: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    shutil.copytree(source, target)
    (target / "model.safetensors.index.json").unlink()
    save_file(change(load_file(target / "model.safetensors")), target / "model.safetensors")
    return target


def test_logits_equal_those_of_transformers(tiny_gemma: Path) -> None:
    import jax
    import jax.numpy as jnp
    import torch
    from transformers import AutoModelForCausalLM

    tokens = np.random.default_rng(0).integers(8, 1024, (4, 160)).astype(np.int32)  # longer than the sliding window of 128
    oracle: Any = AutoModelForCausalLM.from_pretrained(tiny_gemma, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = oracle(torch.tensor(tokens)).logits.numpy()
    mesh = make_mesh(4, 2)
    with mesh, jax.default_matmul_precision("highest"):
        model: Any = build_model(tiny_gemma, mesh, "float32", lora=None)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        logits = model(jnp.asarray(tokens), positions, jnp.ones_like(tokens))
    assert np.abs(np.asarray(logits) - expected).max() < 1e-3
    assert np.abs(expected).max() > 1  # the comparison is not between zeros


@pytest.mark.parametrize(("name", "shape"), [("same", (6, 4)), ("linear", (6, 4)), ("heads", (3, 8, 5)), ("output_heads", (3, 5, 8))])
def test_a_layout_is_undone_by_its_inverse(name: str, shape: tuple[int, ...]) -> None:
    parameter = np.random.default_rng(0).standard_normal(shape)
    (tensor,) = LAYOUTS[name].to_hf(parameter)
    assert np.array_equal(LAYOUTS[name].to_tunix(tensor, shape=shape), parameter)


def test_the_table_names_every_tensor_of_the_files_once(tiny_gemma: Path) -> None:
    rows = gemma4_rows(read_text_config(tiny_gemma))
    names = [name for row in rows for name in row.hf]
    assert len(names) == len(set(names))
    with TensorFiles(tiny_gemma) as files:
        assert {f"model.{name}" for name in names} == set(files.file_of)
    assert not any("layers.5.self_attn.v_proj" in name for name in names)  # the global layer shares K with V


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if "layers.3.mlp.up_proj" not in k}, "1 tensors are missing.*layers.3.mlp.up_proj"),
        (lambda t: {**t, "model.layers.9.strange": t["model.norm.weight"]}, "belong to no parameter.*strange"),
        (lambda t: {f"base.{k}": v for k, v in t.items()}, "not a Gemma 4"),
        (lambda t: {**t, "model.norm.weight": np.ones(7, np.float32)}, r"model.norm.weight \[7\] does not fit"),
    ],
)
def test_files_that_are_not_the_model_are_refused(
    tiny_gemma: Path, tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    folder = rewritten(tiny_gemma, tmp_path / "model", change)
    with pytest.raises(ModelError, match=message):
        build_model(folder, make_mesh(4, 2), "float32", lora=None)


def test_the_official_multimodal_names_load_and_towers_are_passed_over(tiny_gemma: Path, tmp_path: Path) -> None:
    def official(tensors: dict[str, Any]) -> dict[str, Any]:
        renamed = {k.replace("model.", "model.language_model.", 1): v for k, v in tensors.items()}
        return {**renamed, "model.vision_tower.patch.weight": np.ones(3, np.float32)}

    folder = rewritten(tiny_gemma, tmp_path / "model", official)
    with TensorFiles(folder) as files:
        check_complete(files, gemma4_rows(read_text_config(folder)))
        assert files.prefix == "model.language_model."


def test_a_cut_file_is_refused(tiny_gemma: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_gemma, folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        TensorFiles(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "is not Gemma 4"),
        ({"enable_moe_block": True}, "enable_moe_block is true, and num_experts is None"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
            "top_k_experts is 5, and num_experts is 4",
        ),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2, which leaves no full_attention layer"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6, which leaves no full_attention layer"),
        ({"num_global_key_value_heads": None}, "attention_k_eq_v is true, and num_global_key_value_heads is null"),
        ({"attention_bias": True}, "attention_bias = True is not supported; models with attention_bias = False"),
        ({"hidden_activation": "silu"}, "hidden_activation = 'silu' is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False is not supported"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not supported"),
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512},
            "vocab_size_per_layer_input = 512 is not supported; models where it is vocab_size, 1024, are",
        ),
    ],
)
def test_models_that_cannot_be_trained_are_refused(tiny_gemma: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config = json.loads((tiny_gemma / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match=message):
        read_text_config(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_text_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "does not hold an object"),
        (b"\xff\xfe{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        ({"text_config": None}, "text_config = None is not an object"),
        ({"num_attention_heads": "4"}, "num_attention_heads = '4': input should be a valid integer"),
        ({"head_dim": 0}, "head_dim = 0: input should be greater"),
        ({"head_dim": 2**31}, "head_dim = 2147483648: input should be less"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05: input should be less"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan: input should be a finite number"),
        ({"layer_types": ["strange"] * 6}, "layer_types.0 = 'strange'"),
        ({"num_hidden_layers": 7}, "names 6 layer_types, and num_hidden_layers is 7"),
        ({"rope_parameters": {}}, "rope_parameters.sliding_attention is missing"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": "1e4"}}}, "rope_theta = '1e4'"),
    ],
)
def test_a_damaged_config_is_named_with_its_key(tiny_gemma: Path, tmp_path: Path, content: bytes | dict[str, Any], message: str) -> None:
    path = tmp_path / "config.json"
    config = json.loads((tiny_gemma / "config.json").read_text())
    path.write_bytes(content if isinstance(content, bytes) else json.dumps({**config, **content}).encode())
    with pytest.raises(ModelError, match=rf"config\.json: .*{message}.*fetch the model's files again"):
        read_text_config(tmp_path)


@pytest.mark.parametrize("key", ["vocab_size", "layer_types", "attention_k_eq_v", "rope_parameters"])
def test_a_key_that_is_missing_is_named(tiny_gemma: Path, tmp_path: Path, key: str) -> None:
    config = json.loads((tiny_gemma / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != key}))
    with pytest.raises(ModelError, match=rf"config\.json: {key} is missing"):
        read_text_config(tmp_path)


def test_a_fingerprint_of_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: not valid JSON"):
        model_fingerprint(tmp_path)

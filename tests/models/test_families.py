"""Each of Gemma 4's structures computes in Tunix what transformers computes from the same files, packed or not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from tiny_gemma import FAMILIES, QUICKLY, SHORT, rewrite_tensors, write_uneven_gemma

from gemma_ray.errors import ModelError
from gemma_ray.models.axes import AXES
from gemma_ray.models.gemma4 import OFFICIAL, PRESETS, kv_origins, text_config
from gemma_ray.models.loading import TensorFiles
from gemma_ray.training.build import build_model
from gemma_ray.training.config import LoraConfig
from gemma_ray.training.loss import next_token_loss
from gemma_ray.training.sharding import make_mesh, working_meshes

MOST_DIFFERENT = 2e-4
ROWS = 8


def mesh_of(preset: str) -> jax.sharding.Mesh:
    """Eight devices, with tensor parallelism where the model takes it."""
    return make_mesh(*working_meshes(text_config(preset), ROWS, 8)[0])


def oracle(folder: Path) -> Any:
    """transformers' model of the files; every tensor must be one of it, and every parameter filled."""
    import torch
    from transformers import Gemma4ForCausalLM

    options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    found: Any = Gemma4ForCausalLM.from_pretrained(folder, **options)
    model, loading = found
    assert not any(loading.values()), loading
    return model


def expected_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def tunix_logits(folder: Path, mesh: jax.sharding.Mesh, tokens: np.ndarray, positions: np.ndarray, segments: np.ndarray) -> np.ndarray:
    with mesh, jax.default_matmul_precision("highest"):
        model = build_model(folder, mesh, "float32", lora=None)
        return np.asarray(nnx.jit(lambda m, *row: m(*row))(model, tokens, positions, segments))


def random_tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(8, 1024, shape).astype(np.int32)


def logits_of_whole_rows(folder: Path, mesh: jax.sharding.Mesh, tokens: np.ndarray) -> np.ndarray:
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return tunix_logits(folder, mesh, tokens, positions, np.ones_like(tokens))


def test_logits_are_those_of_transformers(family: Path) -> None:
    tokens = random_tokens(ROWS, 160)  # longer than the sliding window of 128
    expected = expected_logits(oracle(family), tokens)
    difference = np.abs(logits_of_whole_rows(family, mesh_of(family.name), tokens) - expected).max()
    print(f"{family.name}: {difference:.1e} of {np.abs(expected).max():.1f}")
    assert difference <= MOST_DIFFERENT
    assert np.abs(expected).max() > 1


def test_a_packed_document_has_the_logits_that_transformers_gives_it_alone(family: Path) -> None:
    """With padding after the documents, in which experts choose and keys are shared as elsewhere."""
    lengths, tokens = (150, 7, 60, 23), random_tokens(ROWS, 256)
    positions, segments = np.zeros_like(tokens), np.zeros_like(tokens)
    starts = np.cumsum((0, *lengths[:-1]))
    for number, (start, length) in enumerate(zip(starts, lengths, strict=True), 1):
        positions[:, start : start + length], segments[:, start : start + length] = np.arange(length), number
    found, model = tunix_logits(family, mesh_of(family.name), tokens, positions, segments), oracle(family)
    for start, length in zip(starts, lengths, strict=True):
        document = slice(start, start + length)
        assert np.abs(found[:, document] - expected_logits(model, tokens[:, document])).max() <= MOST_DIFFERENT


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["gemma4-tiny-e2b", "gemma4-tiny-26b-a4b"])
def test_a_remat_policy_changes_no_gradient(preset: str, tmp_path: Path) -> None:
    """Through keys and values that layers share, and through experts on a mesh."""
    folder, tokens = write_uneven_gemma(tmp_path / "model", preset, **SHORT[preset]), random_tokens(4, 16)
    batch = {"tokens": tokens, "positions": np.broadcast_to(np.arange(16, dtype=np.int32), tokens.shape)}
    batch |= {"segments": np.ones_like(tokens), "loss_mask": np.ones_like(tokens, bool), "scopes": np.zeros_like(tokens, np.int8)}
    found = {}
    with pair_of_devices() as mesh, jax.default_matmul_precision("highest"):
        for remat in ("none", "elementwise", "layer"):
            model = build_model(folder, mesh, "float32", LoraConfig(rank=4, alpha=8), remat=remat)
            graph, adapter, rest = nnx.split(model, nnx.LoRAParam, ...)
            loss = jax.jit(jax.grad(lambda a, rest, graph=graph: next_token_loss(nnx.merge(graph, a, rest), **batch)[0]))
            gradients = loss.lower(adapter, rest).compile(QUICKLY)(adapter, rest)
            found[remat] = np.concatenate([np.asarray(g).ravel() for g in jax.tree.leaves(gradients)])
    reference = np.linalg.norm(found["none"])
    assert reference > 0
    for gradients in found.values():
        assert np.linalg.norm(gradients - found["none"]) <= 1e-4 * reference


def pair_of_devices() -> jax.sharding.Mesh:
    return jax.make_mesh((1, 2, 1), AXES, devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,) * 3)


@pytest.mark.parametrize("name", [*PRESETS, *OFFICIAL])
@pytest.mark.parametrize("shared", [None, 3, 4, 7])
def test_keys_and_values_come_from_the_layer_that_transformers_takes(name: str, shared: int | None) -> None:
    import torch
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextAttention

    text = text_config(name)
    most = text["num_hidden_layers"] - text["layer_types"].index("full_attention") - 1
    count = text["num_kv_shared_layers"] if shared is None else min(shared, most)
    config = Gemma4TextConfig(**{k: v for k, v in text.items() if k not in ("architectures", "model_type", "dtype")})
    config.num_kv_shared_layers = count
    with torch.device("meta"):
        layers: list[Any] = [Gemma4TextAttention(config, i) for i in range(text["num_hidden_layers"])]
    stored = {layer.layer_type: layer.layer_idx for layer in layers if layer.store_full_length_kv}
    expected = [stored[layer.layer_type] if layer.is_kv_shared_layer else layer.layer_idx for layer in layers]
    assert kv_origins(text["layer_types"], count) == expected


def test_a_model_whose_last_own_layers_are_alike_is_that_of_transformers(tmp_path: Path) -> None:
    """Four of twelve layers share, and the two before them are both sliding-window layers."""
    folder, tokens = tmp_path / "model", random_tokens(ROWS, 48)
    write_uneven_gemma(folder, "gemma4-tiny-e4b", num_kv_shared_layers=4, use_double_wide_mlp=True)
    expected = expected_logits(oracle(folder), tokens)
    assert np.abs(logits_of_whole_rows(folder, make_mesh(4, 2), tokens) - expected).max() <= MOST_DIFFERENT


def test_upstream_still_takes_the_last_two_layers_and_rounds_their_number_down() -> None:
    """Fails when google/tunix, models/gemma4/model.py, is mended; `_kv_sharing` of `models/packed.py` is then needless."""
    from tunix.models.gemma4 import model as tunix_model

    def upstream(name: str, shared: int) -> tuple[list[int], list[int]]:
        kinds = text_config(name)["layer_types"]
        attention = {"sliding_attention": tunix_model.AttentionType.LOCAL_SLIDING, "full_attention": tunix_model.AttentionType.GLOBAL}
        types = tuple(attention[kind] for kind in kinds)
        found = tunix_model.create_kv_cache_sharing_patterns(len(kinds), shared / len(kinds), True, True, types)
        return found, kv_origins(kinds, shared)

    for right in (upstream("gemma4-e2b", 20), upstream("gemma4-e4b", 18)):  # of the released ones nothing shows
        assert right[0] == right[1]
    for wrong in (upstream("gemma4-tiny-e4b", 4), upstream("gemma4-e4b", 23)):
        assert wrong[0] != wrong[1]


def with_unread_tensors(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the released files have besides: keys and values of layers that use another's."""
    layers = sorted({name.split(".")[2] for name in tensors if ".layers." in name}, key=int)
    sharing = [i for i in layers if f"model.layers.{i}.self_attn.k_proj.weight" not in tensors]
    names = [f"model.layers.{i}.self_attn.{part}.weight" for i in sharing for part in ("k_proj", "v_proj", "k_norm")]
    assert names
    return {**tensors, **{name: np.full((2, 3), np.nan, np.float32) for name in names}}


@pytest.mark.parametrize("preset", ["gemma4-tiny-e2b", "gemma4-tiny-e4b"])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_files_may_hold_keys_and_values_that_nobody_reads(preset: str, prefix: str, tmp_path: Path) -> None:
    plain, released = write_uneven_gemma(tmp_path / "plain", preset), tmp_path / "released"
    shutil.copytree(plain, released)
    rewrite_tensors(released, lambda t: {k.replace("model.", prefix, 1): v for k, v in with_unread_tensors(t).items()})
    tokens, mesh = random_tokens(ROWS, 16), mesh_of(preset)
    assert np.array_equal(logits_of_whole_rows(plain, mesh, tokens), logits_of_whole_rows(released, mesh, tokens))


def test_keys_and_values_of_a_layer_that_has_its_own_are_not_passed_over(tmp_path: Path) -> None:
    folder = write_uneven_gemma(tmp_path / "model", "gemma4-tiny-26b-a4b")
    rewrite_tensors(folder, lambda t: {**t, "model.layers.5.self_attn.v_proj.weight": t["model.layers.5.self_attn.k_proj.weight"]})
    with pytest.raises(ModelError, match=r"1 tensors belong to no parameter, the first: model\.layers\.5\.self_attn\.v_proj"):
        build_model(folder, make_mesh(4, 2), "float32", lora=None)


@pytest.mark.parametrize(
    ("preset", "tensor"),
    [
        ("gemma4-tiny-e2b", "embed_tokens_per_layer.weight"),
        ("gemma4-tiny-e4b", "layers.11.per_layer_input_gate.weight"),
        ("gemma4-tiny-26b-a4b", "layers.0.router.per_expert_scale"),
        ("gemma4-tiny-26b-a4b", "layers.4.experts.down_proj"),
    ],
)
def test_a_tensor_that_is_missing_or_turned_is_named(preset: str, tensor: str, tmp_path: Path) -> None:
    name = f"model.{tensor}"
    folder = write_uneven_gemma(tmp_path / "model", preset)
    with TensorFiles(folder) as files:
        shape = files.shape(name)
    rewrite_tensors(folder, lambda t: {**t, name: np.ascontiguousarray(t[name].reshape(*shape[:-2], -1, *shape[-2:-1], 1))})
    with pytest.raises(ModelError, match=f"{name} .* does not fit"):
        build_model(folder, mesh_of(preset), "float32", lora=None)
    rewrite_tensors(folder, lambda t: {k: v for k, v in t.items() if k != name})
    with pytest.raises(ModelError, match=f"1 tensors are missing, the first: {name}"):
        build_model(folder, mesh_of(preset), "float32", lora=None)


@pytest.mark.parametrize("preset", FAMILIES)
def test_a_layer_that_uses_anothers_keys_and_values_has_no_parameters_for_its_own(preset: str) -> None:
    from gemma_ray.training.build import abstract_model

    text = text_config(preset)
    with mesh_of(preset) as mesh:
        paths = abstract_model(text, mesh, "float32", lora=None).base_leaves
    own = [i for i, origin in enumerate(kv_origins(text["layer_types"], text["num_kv_shared_layers"])) if i == origin]
    for part in ("kv_einsum.w|k_einsum.w", "_key_norm.scale"):
        has = [i for i in range(text["num_hidden_layers"]) if any(f"layers.{i}.attn.{name}" in paths for name in part.split("|"))]
        assert has == own


def test_the_config_of_a_preset_is_read_back(family: Path) -> None:
    from gemma_ray.models.gemma4 import read_text_config

    assert read_text_config(family) == json.loads((family / "config.json").read_text()) == text_config(family.name)

"""The layout table against the annotations that Tunix and Qwix put on the parameters, and what it says of every released size."""

from __future__ import annotations

import math

import numpy as np
import pytest
from flax import nnx

from gemma_ray.data.config import DataConfig
from gemma_ray.errors import ModelError, RecipeError
from gemma_ray.models.config import PretrainConfig
from gemma_ray.models.gemma4 import OFFICIAL, PRESETS, text_config
from gemma_ray.section import Section
from gemma_ray.training.build import abstract_model
from gemma_ray.training.config import LoraConfig, MeshConfig, TrainConfig
from gemma_ray.training.sharding import (
    ROWS,
    check_mesh,
    dimension_sizes,
    make_mesh,
    mesh_problems,
    model_rows,
    named_sharding,
    working_meshes,
)


@pytest.mark.parametrize("name", [*PRESETS, *OFFICIAL])
def test_the_table_is_what_upstream_annotates(name: str) -> None:
    text = text_config(name)
    if name in OFFICIAL:  # one layer of each kind is enough of the large ones
        text["num_hidden_layers"], text["layer_types"], text["num_kv_shared_layers"] = 6, text["layer_types"][:6], 0
    rank, table = 7, {row.name: row for row in model_rows(text)}
    with make_mesh(*working_meshes(text, 8, 8)[0]) as mesh:
        model = abstract_model(text, mesh, "bfloat16", LoraConfig(rank=rank))
    sizes = {**dimension_sizes(text, 8), "r": (rank,), "2": (2,), "1": (1,)}
    for path, leaf in {**model.base_leaves, **model.adapter_leaves}.items():
        row = table[path.split(".", 2)[2] if path.startswith("layers.") else path]
        assert tuple(leaf.sharding.spec) + (None,) * (len(leaf.shape) - len(leaf.sharding.spec)) == row.axes, path
        for dimension, size in zip(row.dimensions, leaf.shape, strict=True):
            assert size in sizes[dimension], (path, dimension)


def test_every_row_of_the_table_is_of_some_model() -> None:
    seen = set()
    for name in PRESETS:
        with make_mesh(8, 1) as mesh:
            model = abstract_model(text_config(name), mesh, "bfloat16", LoraConfig(rank=4))
        paths = {**model.base_leaves, **model.adapter_leaves}
        seen |= {path.split(".", 2)[2] if path.startswith("layers.") else path for path in paths}
    activations = {"tokens and masks", "hidden states", "queries", "expert weights at work"}
    assert {row.name for row in ROWS if not row.name.startswith("keys and values")} - activations == seen


@pytest.mark.parametrize(
    ("shape", "spec", "message"),
    [
        ((4, 6), ("fsdp",), r"attn\.k_einsum\.w_lora_b \[4, 6\] has 2 dimensions but is laid out as \('fsdp',\)"),
        ((4, 6), ("fsdp", None, "tp"), r"attn\.k_einsum\.w_lora_b \[4, 6\] has 2 dimensions but is laid out as"),
        ((6, 4), ("fsdp", "tp"), r"attn\.k_einsum\.w_lora_b \[6, 4\] laid out as .*: 6 is not divisible by fsdp=4"),
        ((4, 3), (None, "tp"), r"attn\.k_einsum\.w_lora_b \[4, 3\] laid out as .*: 3 is not divisible by tp=2"),
    ],
)
def test_an_annotation_of_the_wrong_rank_or_that_does_not_divide_is_named(
    shape: tuple[int, ...], spec: tuple[str | None, ...], message: str
) -> None:
    """As it was before google/tunix 1138, 1180 and 1186."""
    variable = nnx.LoRAParam(np.zeros(shape, np.float32))
    variable.set_metadata(out_sharding=spec)
    with pytest.raises(ModelError, match=message):
        named_sharding("layers.5.attn.k_einsum.w_lora_b", variable, make_mesh(4, 2))


MESHES_OF_8 = {
    "gemma4-e2b": [(8, 1)],
    "gemma4-e4b": [(4, 2), (8, 1)],
    "gemma4-26b-a4b": [(4, 2), (8, 1)],
    "gemma4-31b": [(2, 4), (4, 2), (8, 1)],
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_meshes_of_eight_devices(name: str) -> None:
    assert working_meshes(text_config(name), 8, 8) == MESHES_OF_8[name]


def test_31b_takes_tp_4_and_not_8() -> None:
    text = text_config("gemma4-31b")
    assert mesh_problems(text, 8, fsdp=1, tp=4) == []
    with pytest.raises(RecipeError) as refused:
        check_mesh(text, 8, fsdp=1, tp=8)
    assert "KV heads of the global layers 4 are not divisible by tp=8 (attn.k_einsum.w and more)" in str(refused.value)
    assert "On 8 devices these work: fsdp=2 tp=4, fsdp=4 tp=2, fsdp=8 tp=1" in str(refused.value)


def test_a_micro_batch_that_does_not_divide_is_named() -> None:
    with pytest.raises(RecipeError, match=r"rows of a micro-batch 3 are not divisible by fsdp=2 \(tokens and masks and more\)"):
        check_mesh(text_config("gemma4-31b"), 3, fsdp=2, tp=4)


def test_the_remedy_is_the_batch_when_only_the_batch_is_at_fault() -> None:
    text = text_config("gemma4-tiny")
    with pytest.raises(RecipeError, match=r"Make train\.batch_size / train\.micro_batches a multiple of 2$"):
        check_mesh({**text, "num_attention_heads": 6, "num_key_value_heads": 6}, 3, fsdp=2, tp=2)
    with pytest.raises(RecipeError, match=r"a multiple of 4\. Or: On 4 devices these work: fsdp=2 tp=2"):
        check_mesh(text, 2, fsdp=4, tp=1)
    with pytest.raises(RecipeError, match="No mesh of 21 devices works with 3 rows a micro-batch"):
        check_mesh(text, 3, fsdp=7, tp=3)


@pytest.mark.parametrize("key", ["fsdp", "tp"])
def test_a_mesh_of_a_typing_error_is_refused_at_once(key: str) -> None:
    with pytest.raises(ValueError, match="65536"):
        MeshConfig.model_validate({key: 99_999_999_999})
    assert working_meshes(text_config("gemma4-tiny"), 8, 65_536**2) == []


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        *((TrainConfig, key, value) for key in ("learning_rate", "weight_decay", "clip_norm") for value in (math.inf, math.nan)),
        *((section, "seed", value) for section in (TrainConfig, PretrainConfig, DataConfig) for value in (-1, 2**31)),
        (LoraConfig, "alpha", math.inf),
        (LoraConfig, "rank", 1_000_000),
        (TrainConfig, "steps", 2**31),
        (TrainConfig, "batch_size", 1_000_001),
        (PretrainConfig, "steps", 2**31),
        (PretrainConfig, "batch_size", 1_000_001),
        (PretrainConfig, "seq_len", 10_000_001),
        (PretrainConfig, "modules", 10_000_001),
        (DataConfig, "max_seq_len", 10_000_001),
        (DataConfig, "examples", 10_000_001),
    ],
)
def test_a_number_that_can_only_be_a_typing_error_is_refused(section: type[Section], key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        section.model_validate({key: value})

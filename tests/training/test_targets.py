"""Which layers a LoRA target reaches: the table of every structure, and what its check finds."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tiny_gemma import FAMILIES

from gemma_ray.errors import ModelError
from gemma_ray.models.gemma4 import OFFICIAL, text_config
from gemma_ray.training.build import abstract_model
from gemma_ray.training.config import TARGETS, LoraConfig
from gemma_ray.training.lora import MODULES, module_pattern, modules_of
from gemma_ray.training.sharding import make_mesh
from gemma_ray.training.targets import TargetTable, target_table

TUNIX_NAMES = ("attn_vec_einsum", "down_proj", "gate_proj", "k_einsum", "kv_einsum", "q_einsum", "up_proj")


def lora_of(*targets: str) -> LoraConfig:
    """Targets by any names, whatever the recipe's section lets pass."""
    return LoraConfig.model_construct(rank=4, alpha=8.0, targets=targets)


def table_of(preset: str, *targets: str) -> TargetTable:
    """From the adapter that Qwix makes."""
    text, lora = text_config(preset), LoraConfig(rank=4, alpha=8)
    with make_mesh(8, 1) as mesh:
        leaves = abstract_model(text, mesh, "float32", lora).adapter_leaves
    modules = modules_of(targets)
    return target_table(text, lora_of(*targets), [path for path in leaves if path.split(".")[-2] in modules])


@pytest.mark.parametrize("preset", FAMILIES)
def test_all_targets_reach_every_layer_that_has_them(preset: str) -> None:
    table = table_of(preset, *TARGETS)
    table.check()
    assert [row.target for row in table.rows] == list(TARGETS)
    assert not any(row.layers("missing") for row in table.rows)
    assert ("experts → not adapted (experts)" in table.describe()) == preset.endswith("26b-a4b")


def test_the_table_of_31b_fits_a_screen() -> None:
    text = text_config("gemma4-31b")
    leaves = [
        f"layers.{i}.{part}.{module}.w_lora_{side}"
        for i, kind in enumerate(text["layer_types"])
        for part, module in (("attn", "q_einsum"), ("attn", "k_einsum" if kind == "full_attention" else "kv_einsum"))
        for side in "ab"
    ]
    assert target_table(text, lora_of("q_proj", "k_proj", "v_proj"), leaves).describe().splitlines() == [
        "q_proj → q_einsum layers 0-59 (60)",
        "k_proj → kv_einsum layers 0-4, 6-10, …, 54-58 (50); k_einsum layers 5, 11, …, 59 (10)",
        "v_proj → kv_einsum layers 0-4, 6-10, …, 54-58 (50); none in layers 5, 11, …, 59 (10): V is K, adapted as k_proj",
    ]


def test_a_layer_that_uses_anothers_keys_and_values_has_none_to_adapt() -> None:
    lines = table_of("gemma4-tiny-e2b", *TARGETS).describe().splitlines()
    assert lines[1] == "k_proj → kv_einsum layers 0-4 (5); none in layers 5-9 (5): keys and values are an earlier layer's"
    assert lines[0] == "q_proj → q_einsum layers 0-9 (10)"


@pytest.mark.parametrize("preset", ["gemma4-tiny", "gemma4-tiny-26b-a4b"])
def test_the_pattern_of_the_paper_leaves_the_global_layers_out_and_is_caught(preset: str) -> None:
    """arXiv 2605.25645 names q_einsum, kv_einsum, attn_vec_einsum and the MLP's three, and not k_einsum."""
    with pytest.raises(ModelError) as refused:
        table_of(preset, "q_einsum", "kv_einsum", "attn_vec_einsum", "gate_proj", "up_proj", "down_proj").check()
    assert "k_proj reaches only a part: of the 6 layers that have it 1 are left out, 5, where it is k_einsum" in str(refused.value)
    assert "name k_einsum as well, or k_proj instead" in str(refused.value)


def test_that_pattern_is_refused_before_a_model_is_built() -> None:
    with make_mesh(8, 1) as mesh, pytest.raises(ModelError, match="k_proj reaches only a part"):
        abstract_model(text_config("gemma4-tiny"), mesh, "float32", lora_of("q_einsum", "kv_einsum"))


@pytest.mark.parametrize("preset", ["gemma4-tiny-e2b", "gemma4-tiny-e4b"])
def test_it_is_right_where_keys_are_never_values(preset: str) -> None:
    table_of(preset, "q_einsum", "kv_einsum", "attn_vec_einsum").check()


def test_tunix_names_and_hugging_faces_mean_the_same_adapter() -> None:
    text = text_config("gemma4-tiny")
    with make_mesh(8, 1) as mesh:
        by_tunix = abstract_model(text, mesh, "float32", lora_of(*TUNIX_NAMES)).adapter_leaves
        by_hugging_face = abstract_model(text, mesh, "float32", lora_of(*TARGETS)).adapter_leaves
    assert by_tunix == by_hugging_face


def test_an_adapter_that_is_missing_in_one_layer_or_not_asked_for_is_named() -> None:
    text = text_config("gemma4-tiny")
    whole = [f"layers.{i}.attn.q_einsum.w_lora_{side}" for i in range(6) for side in "ab"]
    target_table(text, lora_of("q_proj"), whole).check()
    with pytest.raises(ModelError, match=r"q_proj reaches only a part: of the 6 .* 1 are left out, 3, .* no adapter was made"):
        target_table(text, lora_of("q_proj"), [path for path in whole if path != "layers.3.attn.q_einsum.w_lora_b"]).check()
    with pytest.raises(ModelError, match=r"adapted without being named: layers\.0\.moe\.linear_lora_a"):
        target_table(text, lora_of("q_proj"), [*whole, "layers.0.moe.linear_lora_a"]).check()


def test_a_name_that_is_no_projection_is_refused() -> None:
    with pytest.raises(ModelError, match="'qkv_proj' is no projection; choose from attn_vec_einsum"):
        modules_of(["q_proj", "qkv_proj"])
    assert modules_of(TARGETS) == modules_of(TUNIX_NAMES) == TUNIX_NAMES


@pytest.mark.parametrize("preset", [*FAMILIES, *OFFICIAL])
def test_the_pattern_matches_whole_modules_and_nothing_else(preset: str) -> None:
    """Of the names of every parameter that the model has: per-layer projections, routers and experts stay as they are."""
    from gemma_ray.models.parameter_map import gemma4_rows

    pattern = module_pattern(TARGETS)
    modules = {row.tunix.rsplit(".", 1)[0].replace(".", "/") for row in gemma4_rows(text_config(preset))}
    matched = {module.rsplit("/", 1)[1] for module in modules if re.fullmatch(pattern, module)}
    assert matched <= {module for held_by in MODULES.values() for module in held_by}
    for module in ("layers/0/per_layer_projection", "layers/0/moe", "layers/0/moe/gate_proj", "layers/0/attn/my_q_einsum", "gate_proj"):
        assert not re.fullmatch(pattern, module)


@pytest.mark.parametrize("targets", [("q_proj",), ("k_proj", "v_proj"), TARGETS, TUNIX_NAMES, ("kv_einsum",)])
@pytest.mark.parametrize("preset", FAMILIES)
def test_the_planner_counts_the_adapter_that_is_made(preset: str, targets: tuple[str, ...]) -> None:
    import math

    from gemma_ray.planning.sizes import lora_parameters

    text: dict[str, Any] = text_config(preset)
    with make_mesh(8, 1) as mesh:
        leaves = abstract_model(text, mesh, "float32", LoraConfig(rank=4, alpha=8)).adapter_leaves
    made = sum(math.prod(leaf.shape) for path, leaf in leaves.items() if path.split(".")[-2] in modules_of(targets))
    assert lora_parameters(text, 4, targets) == made

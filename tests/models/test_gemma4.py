"""The released sizes against Tunix's own, and against what transformers makes of the same config.json."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gemma_ray.models.gemma4 import OFFICIAL, official_name, text_config, tunix_config

TUNIX = {"gemma4-e2b": "gemma4_e2b", "gemma4-e4b": "gemma4_e4b", "gemma4-26b-a4b": "gemma4_26b_a4b", "gemma4-31b": "gemma4_31b"}


@pytest.mark.parametrize("name", OFFICIAL)
def test_a_released_size_is_tunix_own(name: str) -> None:
    from tunix.models.gemma4 import model as tunix_model

    expected = dataclasses.asdict(getattr(tunix_model.ModelConfig, TUNIX[name])())
    found = dataclasses.asdict(tunix_config(text_config(name), "float32"))
    found["attention_pattern"] = found["attention_pattern"][: len(expected["attention_pattern"])]
    assert {key: value for key, value in found.items() if value != expected[key]} == {}


@pytest.mark.parametrize("name", OFFICIAL)
def test_every_layer_has_its_kind(name: str) -> None:
    text = text_config(name)
    assert len(text["layer_types"]) == text["num_hidden_layers"]
    assert text["layer_types"][-1] == "full_attention"


def test_transformers_counts_30_7_billion_parameters_in_31b() -> None:
    """Shapes only: nothing is allocated."""
    import torch
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    text = text_config("gemma4-31b")
    config = Gemma4TextConfig(**{key: value for key, value in text.items() if key not in ("architectures", "model_type", "dtype")})
    with torch.device("meta"):
        model: Any = Gemma4ForCausalLM(config)
    # By hand: q, kv and o of a sliding layer are 5376 · 8192 each, of a global one q and o 5376 · 16384 and k 5376 · 2048.
    mlp, norms = 3 * 5376 * 21504, 4 * 5376
    sliding = 3 * 5376 * 8192 + mlp + norms + 2 * 256
    full = 2 * 5376 * 16384 + 5376 * 2048 + mlp + norms + 2 * 512
    by_hand = 50 * sliding + 10 * full + 262_144 * 5376 + 5376
    assert sum(p.numel() for p in model.parameters()) == by_hand == 30_697_345_280


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("/mnt/models/gemma-4-31b-it", "gemma4-31b"),
        ("gs://bucket/Gemma-4-E4B/", "gemma4-e4b"),
        ("models/gemma-4-26b-a4b-it", "gemma4-26b-a4b"),
        ("/mnt/models/llama-3", None),
    ],
)
def test_a_folder_tells_its_size(source: str, name: str | None) -> None:
    assert official_name(source) == name

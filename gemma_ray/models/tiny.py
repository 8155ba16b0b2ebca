"""A small Gemma 4 of our own: Hugging Face files with seeded random weights, ready for training from scratch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from gemma_ray.artifacts import write_json
from gemma_ray.models.gemma4 import text_config
from gemma_ray.models.parameter_map import gemma4_rows


def write_initial_model(preset: str, folder: Path, seed: int) -> None:
    """Write config.json, generation_config.json and random weights into an existing folder; the tokenizer is written beside them.

    Projections are normal with variance 1 / inputs, those that write into the residual stream smaller by the number of layers; embeddings
    normal with variance 1 / hidden_size (the model scales them up by its square root); norms and layer scalars one.
    """
    text = text_config(preset)
    write_json(folder / "config.json", text)
    generation = {"bos_token_id": text["bos_token_id"], "eos_token_id": text["eos_token_id"], "pad_token_id": text["pad_token_id"]}
    write_json(folder / "generation_config.json", generation)
    rng = np.random.default_rng(seed)
    tensors = {f"model.{name}": _initial(name, shape, text, rng) for name, shape in _shapes(text).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    weight_map = dict.fromkeys(tensors, "model.safetensors")
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shapes(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face tensor → shape, [out, in] for projections."""
    d, f = text["hidden_size"], text["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for row in gemma4_rows(text):
        for name in row.hf:
            layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
            is_global = layer >= 0 and text["layer_types"][layer] == "full_attention"
            h = text["global_head_dim"] if is_global else text["head_dim"]
            kv = text["num_global_key_value_heads"] if is_global else text["num_key_value_heads"]
            sizes = {
                "embed_tokens": (text["vocab_size"], d),
                "q_proj": (text["num_attention_heads"] * h, d),
                "k_proj": (kv * h, d),
                "v_proj": (kv * h, d),
                "o_proj": (d, text["num_attention_heads"] * h),
                "q_norm": (h,),
                "k_norm": (h,),
                "gate_proj": (f, d),
                "up_proj": (f, d),
                "down_proj": (d, f),
                "layer_scalar": (1,),
            }
            shapes[name] = sizes.get(name.removesuffix(".weight").split(".")[-1], (d,))
    return shapes


def _initial(name: str, shape: tuple[int, ...], text: dict[str, Any], rng: np.random.Generator) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    std = shape[1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= (2 * text["num_hidden_layers"]) ** 0.5
    return (rng.standard_normal(shape) * std).astype(np.float32)

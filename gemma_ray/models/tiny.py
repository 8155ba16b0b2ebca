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
    normal with variance 1 / width (the model scales them up by its square root); norms and scales one.
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
    return {name: _shape(name, text) for row in gemma4_rows(text) for name in row.hf}


def _shape(name: str, text: dict[str, Any]) -> tuple[int, ...]:
    d, f, n, kv, h = (text[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    layers, p = text["num_hidden_layers"], text["hidden_size_per_layer_input"]
    experts, x = text.get("num_experts") or 0, text.get("moe_intermediate_size") or 0
    layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
    if layer >= 0 and text["layer_types"][layer] == "full_attention":
        h, kv = text["global_head_dim"], text["num_global_key_value_heads"] if text["attention_k_eq_v"] else kv
    if text["use_double_wide_mlp"] and layer >= layers - text["num_kv_shared_layers"]:
        f *= 2
    # fmt: off
    sizes = {
        "embed_tokens": (text["vocab_size"], d),
        "self_attn.q_proj": (n * h, d), "self_attn.k_proj": (kv * h, d), "self_attn.v_proj": (kv * h, d), "self_attn.o_proj": (d, n * h),
        "self_attn.q_norm": (h,), "self_attn.k_norm": (h,),
        "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f),
        "layer_scalar": (1,),
        "embed_tokens_per_layer": (text["vocab_size"], layers * p),
        "per_layer_model_projection": (layers * p, d), "per_layer_projection_norm": (p,),
        "per_layer_input_gate": (p, d), "per_layer_projection": (d, p),
        "router.proj": (experts, d), "router.per_expert_scale": (experts,),
        "experts.gate_up_proj": (experts, 2 * x, d), "experts.down_proj": (experts, d, x),
    }
    # fmt: on
    return sizes.get(name.removeprefix(f"layers.{layer}.").removesuffix(".weight"), (d,))


def _initial(name: str, shape: tuple[int, ...], text: dict[str, Any], rng: np.random.Generator) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    std = (text["hidden_size_per_layer_input"] if "embed_tokens_per_layer" in name else shape[-1]) ** -0.5
    if name.removesuffix(".weight").endswith(("o_proj", "down_proj")):
        std /= (2 * text["num_hidden_layers"]) ** 0.5
    return (rng.standard_normal(shape) * std).astype(np.float32)

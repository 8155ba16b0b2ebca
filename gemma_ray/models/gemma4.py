"""Gemma 4's text architecture: Hugging Face's config.json on one side, Tunix's ModelConfig on the other.

    5 × sliding-window layer ─ 1 × global layer ─ repeat          embeddings tied to the output, logits soft-capped
        q, k, v                    q, k (v = k), fewer KV heads, larger head_dim

    E2B, E4B    v of its own in global layers too; per-layer inputs; the last layers use the keys and values of an earlier one of their kind
    26B-A4B     experts beside the MLP of every layer

`PRESETS` holds the sizes that this project makes itself, `OFFICIAL` the released ones, for plans. What is trained or served is read from
its own config.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gemma_ray.artifacts import read_json
from gemma_ray.errors import ModelError
from gemma_ray.models.config_check import EPSILON, FETCH, check_text_config

PRESETS: dict[str, dict[str, Any]] = {
    # 31B's structure on a laptop: 5 sliding layers to 1 global, k_eq_v globals with fewer KV heads, GQA, tied embeddings, soft cap.
    # head_dim 32 is the least that vLLM's CPU attention takes.
    "gemma4-tiny": {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "head_dim": 32,
        "global_head_dim": 64,
        "sliding_window": 128,
        "max_position_embeddings": 2048,
    },
    # E2B's: per-layer inputs, the last half of the layers without keys and values of their own but with an MLP twice as wide, one KV head.
    "gemma4-tiny-e2b": {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "global_head_dim": 64,
        "sliding_window": 128,
        "max_position_embeddings": 2048,
        "global_every": 5,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 1024,
        "num_kv_shared_layers": 5,
        "use_double_wide_mlp": True,
    },
    # E4B's: the same with two KV heads and one width of MLP.
    "gemma4-tiny-e4b": {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "global_head_dim": 64,
        "sliding_window": 128,
        "max_position_embeddings": 2048,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 1024,
        "num_kv_shared_layers": 6,
    },
    # 26B-A4B's: 31B's attention, and experts beside a small dense MLP in every layer.
    "gemma4-tiny-26b-a4b": {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "head_dim": 32,
        "global_head_dim": 64,
        "sliding_window": 128,
        "max_position_embeddings": 2048,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
}

OFFICIAL: dict[str, dict[str, Any]] = {
    # The released sizes, for plans made where the files are not (google/tunix, models/gemma4/model.py; their own config.json wins).
    "gemma4-e2b": {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "sliding_window": 512,
        "global_every": 5,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
    },
    "gemma4-e4b": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 42,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "num_kv_shared_layers": 18,
    },
    "gemma4-26b-a4b": {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "gemma4-31b": {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
    },
}
_OFFICIAL_COMMON = {
    "vocab_size": 262_144,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 1024,
    "max_position_embeddings": 131_072,
}

_SLIDING, _GLOBAL = "sliding_attention", "full_attention"


def text_config(preset: str) -> dict[str, Any]:
    """config.json of a preset, as a text-only Gemma 4 (`Gemma4ForCausalLM`). Raises ModelError for an unknown name."""
    if preset in OFFICIAL:
        sizes = {**_OFFICIAL_COMMON, **OFFICIAL[preset]}
    elif preset in PRESETS:
        sizes = PRESETS[preset]
    else:
        raise ModelError(f"no built-in model '{preset}'. Built in: {', '.join(PRESETS)}")
    layers, every = sizes["num_hidden_layers"], sizes.get("global_every", 6)
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "dtype": "float32",
        "layer_types": [_GLOBAL if (i + 1) % every == 0 else _SLIDING for i in range(layers)],
        "num_global_key_value_heads": None,
        "attention_k_eq_v": "num_global_key_value_heads" in sizes,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": EPSILON,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "rope_parameters": {
            _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            _GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        },
        "pad_token_id": 0,
        "eos_token_id": [1, 5],
        "bos_token_id": 2,
        "use_cache": True,
        **{key: value for key, value in sizes.items() if key != "global_every"},
    }


def kv_origins(kinds: Sequence[Any], shared: int) -> list[int]:
    """The layer whose keys and values each layer uses: its own, or of the last `shared` layers the last before them of the same kind.

    As transformers has it (models/gemma4/modeling_gemma4.py, Gemma4TextAttention). Tunix takes the last two layers before them for a
    sliding-window and a global one, whatever they are, and counts layers by a fraction that it rounds down.
    """
    own = list(kinds[: len(kinds) - shared])
    last = {kind: i for i, kind in enumerate(own)}
    return [i if i < len(own) else last[kind] for i, kind in enumerate(kinds)]


def official_name(source: str) -> str | None:
    """The released size that a folder is named after (`/mnt/models/gemma-4-31b-it` is gemma4-31b), None when none is."""
    name = source.rstrip("/").rsplit("/", 1)[-1].lower().replace("-", "").replace("_", "")
    return next((size for size in OFFICIAL if size.replace("-", "") in name), None)


def read_text_config(folder: Path) -> dict[str, Any]:
    """The text part of a model folder's config.json.

    Raises ModelError when the file is missing or damaged, a key that is used here is missing or of the wrong type, or it describes a model
    that this version cannot train.
    """
    path = folder / "config.json"
    config = read_object(path)
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise ModelError(f"{path}: text_config = {text!r:.40} is not an object; {FETCH}")
    if not str(text.get("model_type", "")).startswith("gemma4"):
        raise ModelError(f"{path}: model_type '{text.get('model_type')}' is not Gemma 4")
    check_text_config(text, path)
    return text


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder. Raises ModelError when the file is missing, or holds anything else."""
    if not path.is_file():
        raise ModelError(f"{path.parent}: no {path.name}; model.source must be a folder with Hugging Face files")
    try:
        found = read_json(path)
    except (ValueError, RecursionError) as e:  # also bytes that are not UTF-8
        raise ModelError(f"{path}: not valid JSON ({e}); {FETCH}") from e
    if not isinstance(found, dict):
        raise ModelError(f"{path}: does not hold an object; {FETCH}")
    return found


def tunix_config(text: dict[str, Any], dtype: str) -> Any:
    """Tunix's Gemma 4 ModelConfig for a config.json's text part; `dtype` is that of weights and activations.

    Raises ModelError naming a key that is missing.
    """
    import jax.numpy as jnp
    from tunix.models.gemma4 import model as tunix_model

    kinds = {_GLOBAL: tunix_model.AttentionType.GLOBAL, _SLIDING: tunix_model.AttentionType.LOCAL_SLIDING}
    try:
        rope = text["rope_parameters"]
        return tunix_model.ModelConfig(
            num_layers=text["num_hidden_layers"],
            num_embed=text["vocab_size"],
            embed_dim=text["hidden_size"],
            hidden_dim=text["intermediate_size"],
            num_heads=text["num_attention_heads"],
            head_dim=text["head_dim"],
            num_kv_heads=text["num_key_value_heads"],
            num_global_kv_heads=text["num_global_key_value_heads"] if text["attention_k_eq_v"] else None,
            global_key_size=text["global_head_dim"],
            sliding_window_size=text["sliding_window"],
            attention_pattern=tuple(kinds[kind] for kind in text["layer_types"]),
            k_eq_v_global=text["attention_k_eq_v"],
            final_logit_softcap=text["final_logit_softcapping"],
            per_layer_input_dim=text.get("hidden_size_per_layer_input") or 0,
            frac_shared_layers=(text.get("num_kv_shared_layers") or 0) / text["num_hidden_layers"],
            override_kv_shared_ffw_hidden=2 * text["intermediate_size"] if text.get("use_double_wide_mlp") else None,
            enable_moe=bool(text.get("enable_moe_block")),
            num_experts=text.get("num_experts"),
            num_experts_per_tok=text.get("top_k_experts"),
            expert_dim=text.get("moe_intermediate_size"),
            moe_dense_hidden_dim=text["intermediate_size"] if text.get("enable_moe_block") else None,
            local_base_frequency=int(rope[_SLIDING]["rope_theta"]),
            global_base_frequency=int(rope[_GLOBAL]["rope_theta"]),
            global_rope_proportion=rope[_GLOBAL]["partial_rotary_factor"],
            param_dtype=jnp.dtype(dtype),
            dtype=jnp.dtype(dtype),
        )
    except KeyError as e:
        raise ModelError(f"config.json: key {e} is missing; it is not a Gemma 4 text config") from e

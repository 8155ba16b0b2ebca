"""Gemma 4's text architecture: Hugging Face's config.json on one side, Tunix's ModelConfig on the other.

    5 × sliding-window layer ─ 1 × global layer ─ repeat          embeddings tied to the output, logits soft-capped
        q, k, v                    q, k (v = k), fewer KV heads, larger head_dim

`PRESETS` holds the sizes that this project makes itself, `OFFICIAL` the released ones, for plans. What is trained or served is read from
its own config.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gemma_ray.artifacts import read_json
from gemma_ray.errors import ModelError

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
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
}

_SLIDING, _GLOBAL = "sliding_attention", "full_attention"
_Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
EPSILON = 1e-6
"""Of the RMS norms, which Tunix has as a constant."""

FETCH = "fetch the model's files again"


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
        "attention_k_eq_v": True,
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


def official_name(source: str) -> str | None:
    """The released size that a folder is named after (`/mnt/models/gemma-4-31b-it` is gemma4-31b), None when none is."""
    name = source.rstrip("/").rsplit("/", 1)[-1].lower().replace("-", "").replace("_", "")
    return next((size for size in OFFICIAL if size.replace("-", "") in name), None)


def read_text_config(folder: Path) -> dict[str, Any]:
    """The text part of a model folder's config.json.

    Raises ModelError when the file is missing or damaged, a key that is used here is missing or of the wrong type, or it describes a model
    that this version cannot train (not Gemma 4, per-layer input embeddings, shared KV layers, experts).
    """
    path = folder / "config.json"
    config = read_object(path)
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise ModelError(f"{path}: text_config = {text!r:.40} is not an object; {FETCH}")
    if not str(text.get("model_type", "")).startswith("gemma4"):
        raise ModelError(f"{path}: model_type '{text.get('model_type')}' is not Gemma 4")
    unsupported = {
        "hidden_size_per_layer_input": "per-layer input embeddings (E2B, E4B)",
        "num_kv_shared_layers": "shared KV layers (E2B, E4B)",
        "enable_moe_block": "experts (26B-A4B)",
    }
    for key, what in unsupported.items():
        if text.get(key):
            raise ModelError(f"{path}: {key} = {text[key]!r:.40}: training with {what} is not supported; dense Gemma 4 models are")
    _check_types(text, path)
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


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Rope(_Strict):
    rope_theta: float = Field(gt=0)


class _GlobalRope(_Rope):
    partial_rotary_factor: float = Field(gt=0, le=1)


class _RopeByKind(_Strict):
    sliding_attention: _Rope
    full_attention: _GlobalRope


class _TextConfig(_Strict):
    """The keys of config.json that are used here; others pass."""

    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size
    num_global_key_value_heads: _Size | None
    head_dim: _Size
    global_head_dim: _Size
    sliding_window: _Size
    layer_types: list[Literal["sliding_attention", "full_attention"]]
    attention_k_eq_v: bool
    final_logit_softcapping: float | None
    rope_parameters: _RopeByKind
    rms_norm_eps: float = Field(default=EPSILON, ge=EPSILON, le=EPSILON)

    @model_validator(mode="after")
    def _a_kind_for_each_layer(self) -> _TextConfig:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"names {len(self.layer_types)} layer_types, and num_hidden_layers is {self.num_hidden_layers}")
        return self


def _check_types(text: dict[str, Any], path: Path) -> None:
    try:
        _TextConfig.model_validate(text)
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(map(str, first["loc"]))
        value = f"{key} = {first['input']!r:.40}: " if key and first["type"] != "missing" else f"{key} " if key else ""
        why = "is missing" if first["type"] == "missing" else first["msg"].removeprefix("Value error, ")
        raise ModelError(f"{path}: {value}{why[0].lower()}{why[1:]}; {FETCH}") from e


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
            num_global_kv_heads=text["num_global_key_value_heads"],
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

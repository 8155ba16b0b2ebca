"""What a Gemma 4's config.json must hold to be trained here: the keys that are read, their types, and what they may say together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gemma_ray.errors import ModelError

EPSILON = 1e-6
"""Of the RMS norms, which Tunix has as a constant."""

FETCH = "fetch the model's files again"

_LARGEST = 2**31 - 1
_Size = Annotated[int, Field(ge=1, le=_LARGEST)]
_SizeOrNone = Annotated[int, Field(ge=0, le=_LARGEST)] | None

# What Tunix's model has built in: key → the only value it may have, and what that is.
_BUILT_IN: dict[str, tuple[Any, str]] = {
    "hidden_activation": ("gelu_pytorch_tanh", "the activation"),
    "attention_bias": (False, "projections without a bias"),
    "tie_word_embeddings": (True, "an output head that is the embedding table"),
}


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
    hidden_size_per_layer_input: _SizeOrNone = None
    num_kv_shared_layers: _SizeOrNone = None
    use_double_wide_mlp: bool | None = None
    enable_moe_block: bool | None = None
    num_experts: _SizeOrNone = None
    top_k_experts: _SizeOrNone = None
    moe_intermediate_size: _SizeOrNone = None

    @model_validator(mode="after")
    def _a_kind_for_each_layer(self) -> _TextConfig:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"names {len(self.layer_types)} layer_types, and num_hidden_layers is {self.num_hidden_layers}")
        return self

    @model_validator(mode="after")
    def _an_origin_for_shared_keys_and_values(self) -> _TextConfig:
        shared = self.num_kv_shared_layers or 0
        own = self.layer_types[: max(0, self.num_hidden_layers - shared)]
        lacking = sorted(set(self.layer_types) - set(own))
        if shared and lacking:
            raise ValueError(f"num_kv_shared_layers is {shared}, which leaves no {lacking[0]} layer whose keys and values others could use")
        return self

    @model_validator(mode="after")
    def _experts_to_choose_from(self) -> _TextConfig:
        if self.enable_moe_block:
            for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
                if not getattr(self, key):
                    raise ValueError(f"enable_moe_block is true, and {key} is {getattr(self, key)}")
            if (self.top_k_experts or 0) > (self.num_experts or 0):
                raise ValueError(f"top_k_experts is {self.top_k_experts}, and num_experts is {self.num_experts}")
        return self

    @model_validator(mode="after")
    def _global_heads_where_keys_are_values(self) -> _TextConfig:
        if self.attention_k_eq_v and self.num_global_key_value_heads is None:
            raise ValueError("attention_k_eq_v is true, and num_global_key_value_heads is null")
        return self


def check_text_config(text: dict[str, Any], path: Path) -> None:
    """Raise ModelError, naming key, value and remedy, unless this is the text part of a Gemma 4 that can be trained; `path` is its file."""
    try:
        _TextConfig.model_validate(text)
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(map(str, first["loc"]))
        value = f"{key} = {first['input']!r:.40}: " if key and first["type"] != "missing" else f"{key} " if key else ""
        why = "is missing" if first["type"] == "missing" else first["msg"].removeprefix("Value error, ")
        raise ModelError(f"{path}: {value}{why[0].lower()}{why[1:]}; {FETCH}") from e
    for key, (only, what) in _BUILT_IN.items():
        if text.get(key, only) != only:
            raise ModelError(f"{path}: {key} = {text[key]!r:.40} is not supported; models with {key} = {only!r}, {what}, are")
    rows = text.get("vocab_size_per_layer_input", text["vocab_size"])
    if text.get("hidden_size_per_layer_input") and rows != text["vocab_size"]:
        raise ModelError(
            f"{path}: vocab_size_per_layer_input = {rows!r:.40} is not supported; models where it is vocab_size, {text['vocab_size']}, are"
        )
    if text.get("use_bidirectional_attention") == "all":
        raise ModelError(f"{path}: use_bidirectional_attention = 'all' is not supported; models that generate text are causal")

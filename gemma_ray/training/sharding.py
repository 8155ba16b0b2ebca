"""How the model lies on the (fsdp, tp) mesh of a slice, as a table, and the checks that run before anything is loaded.

The specs themselves are Tunix's annotations, which Qwix carries over to LoRA parameters; `named_sharding` reads them and refuses one whose
rank or divisibility is wrong. That mismatch is what stopped the paper's authors (arXiv 2605.25645; since fixed in google/tunix 1138,
1180, 1186). `LAYOUT` says the same without building a model; `tests/training/test_sharding.py` holds it against the annotations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gemma_ray.errors import ModelError, RecipeError
from gemma_ray.models.axes import AXES

if TYPE_CHECKING:
    import jax

# fmt: off
LAYOUT = (
    # parameter or activation          dimensions     on the mesh
    ("embedder.input_embedding",       "v d",         "tp fsdp"),
    ("attn.q_einsum.w",                "n d h",       "tp fsdp -"),
    ("attn.q_einsum.w_lora_a",         "d r",         "fsdp -"),
    ("attn.q_einsum.w_lora_b",         "r n h",       "- tp -"),
    ("attn.k_einsum.w",                "g d h",       "tp fsdp -"),       # K of global layers where it is V too
    ("attn.k_einsum.w_lora_a",         "d r",         "fsdp -"),
    ("attn.k_einsum.w_lora_b",         "r g h",       "- tp -"),
    ("attn.kv_einsum.w",               "2 k d h",     "- tp fsdp -"),     # K and V of the others
    ("attn.kv_einsum.w_lora_a",        "d r",         "fsdp -"),
    ("attn.kv_einsum.w_lora_b",        "r 2 k h",     "- - tp -"),
    ("attn.attn_vec_einsum.w",         "n h d",       "tp - fsdp"),
    ("attn.attn_vec_einsum.w_lora_a",  "n h r",       "tp - -"),
    ("attn.attn_vec_einsum.w_lora_b",  "r d",         "- fsdp"),
    ("mlp.gate_proj.kernel",           "d f",         "fsdp tp"),
    ("mlp.gate_proj.kernel_lora_a",    "d r",         "fsdp -"),
    ("mlp.gate_proj.kernel_lora_b",    "r f",         "- tp"),
    ("mlp.up_proj.kernel",             "d f",         "fsdp tp"),
    ("mlp.up_proj.kernel_lora_a",      "d r",         "fsdp -"),
    ("mlp.up_proj.kernel_lora_b",      "r f",         "- tp"),
    ("mlp.down_proj.kernel",           "f d",         "tp fsdp"),
    ("mlp.down_proj.kernel_lora_a",    "f r",         "tp -"),
    ("mlp.down_proj.kernel_lora_b",    "r d",         "- fsdp"),
    ("pre_attention_norm.scale",       "d",           "tp"),
    ("post_attention_norm.scale",      "d",           "tp"),
    ("pre_ffw_norm.scale",             "d",           "tp"),
    ("post_ffw_norm.scale",            "d",           "tp"),
    ("final_norm.scale",               "d",           "tp"),
    ("skip_scale",                     "1",           "-"),
    ("attn._query_norm.scale",         "h",           "tp"),
    ("attn._key_norm.scale",           "h",           "tp"),
    # E2B and E4B
    ("embedder.per_layer_input_embedding",     "v l p", "tp - fsdp"),
    ("embedder.per_layer_model_projection.w",  "d l p", "fsdp - tp"),
    ("embedder.per_layer_projection_norm.scale", "p",   "tp"),
    ("per_layer_input_gate.w",         "d p",         "fsdp tp"),
    ("per_layer_projection.w",         "p d",         "tp fsdp"),
    ("post_per_layer_input_norm.scale", "d",          "tp"),
    # 26B-A4B
    ("moe.gating_einsum",              "e 2 x d",     "fsdp - - tp"),
    ("moe.linear",                     "e x d",       "fsdp tp -"),
    ("moe.router_logits",              "d e",         "- -"),
    ("moe.router_scale",               "d",           "-"),
    ("moe.per_expert_scale",           "e",           "-"),
    ("moe_pre_ffw_norm.scale",         "d",           "tp"),
    ("moe_post_ffw_norm.scale",        "d",           "tp"),
    ("dense_post_ffw_norm.scale",      "d",           "tp"),
    ("expert weights at work",         "e 2 x d",     "- - tp -"),
    # activations
    ("tokens and masks",               "b t",         "rows -"),
    ("hidden states",                  "b t d",       "rows - -"),
    ("queries",                        "b t n h",     "rows - tp -"),
    ("keys and values of sliding-window layers", "b t k h", "rows - tp -"),
    ("keys and values of global layers", "b t g h",   "rows - tp -"),
)
"""Optimizer state lies like its parameter. `rows` is slices and fsdp together."""

DIMENSIONS = {
    "b": "rows of a micro-batch", "t": "positions", "r": "LoRA rank", "v": "vocabulary", "l": "layers",
    "d": "embedding size", "f": "MLP hidden size", "x": "expert hidden size", "e": "experts", "p": "per-layer embedding size",
    "n": "query heads", "k": "KV heads of the sliding-window layers", "g": "KV heads of the global layers", "h": "head size",
}
# fmt: on


@dataclass(frozen=True)
class Placed:
    """A row of the table."""

    name: str
    dimensions: tuple[str, ...]
    axes: tuple[str | None, ...]


ROWS = tuple(Placed(name, tuple(dims.split()), tuple(None if a == "-" else a for a in axes.split())) for name, dims, axes in LAYOUT)


def dimension_sizes(text: dict[str, Any], batch_size: int) -> dict[str, tuple[int, ...]]:
    """The sizes that a dimension takes in a model (`text` is config.json's text part); none when the model has no such dimension."""
    has_global = "full_attention" in text["layer_types"]
    heads = text["num_key_value_heads"]
    found = {
        "b": batch_size,
        "v": text["vocab_size"],
        "l": text["num_hidden_layers"],
        "d": text["hidden_size"],
        "x": text.get("moe_intermediate_size"),
        "e": text.get("num_experts"),
        "p": text.get("hidden_size_per_layer_input"),
        "n": text["num_attention_heads"],
        "k": heads,
        "g": (text["num_global_key_value_heads"] if text["attention_k_eq_v"] else heads) if has_global else None,
    }
    sizes = {name: (size,) if size else () for name, size in found.items()}
    f = text["intermediate_size"]
    head_sizes = (text["head_dim"], text["global_head_dim"]) if has_global else (text["head_dim"],)
    return {**sizes, "h": head_sizes, "f": (f, 2 * f) if text.get("use_double_wide_mlp") else (f,)}


def mesh_problems(text: dict[str, Any], batch_size: int, fsdp: int, tp: int, slices: int = 1) -> list[str]:
    """Why a mesh does not suit a model and its micro-batch, one sentence a reason with what it concerns; empty when it does."""
    mesh, sizes = {"fsdp": fsdp, "tp": tp, "rows": slices * fsdp}, dimension_sizes(text, batch_size)
    called = {"fsdp": "fsdp", "tp": "tp", "rows": "fsdp" if slices == 1 else f"{slices} slices x fsdp"}
    reasons: dict[str, list[str]] = {}
    for name, dimension, axis in _sharded(text):
        for size in sizes.get(dimension, ()):
            if size % mesh[axis]:
                reasons.setdefault(f"{DIMENSIONS[dimension]} {size} are not divisible by {called[axis]}={mesh[axis]}", []).append(name)
    return [f"{reason} ({names[0]}{' and more' if len(names) > 1 else ''})" for reason, names in reasons.items()]


def model_rows(text: dict[str, Any]) -> tuple[Placed, ...]:
    """The table for one model. A single KV head is not cut: Tunix keeps all of it on every device, and Qwix its adapter."""
    if text["num_key_value_heads"] > 1:
        return ROWS
    alone = ("attn.kv_einsum.w", "attn.kv_einsum.w_lora_b")
    return tuple(replace(row, axes=tuple(None if a == "tp" else a for a in row.axes)) if row.name in alone else row for row in ROWS)


def _sharded(text: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(row, dimension, mesh axis) of everything of this model that is cut."""
    for row in model_rows(text):
        if row.name.startswith("attn.k_einsum") and not text["attention_k_eq_v"]:
            continue
        for dimension, axis in zip(row.dimensions, row.axes, strict=True):
            if axis is not None:
                yield row.name, dimension, axis


def working_meshes(text: dict[str, Any], batch_size: int, devices: int, slices: int = 1) -> list[tuple[int, int]]:
    """Every (fsdp, tp) of so many devices a slice that suits the model and its micro-batch."""
    low = [f for f in range(1, math.isqrt(devices) + 1) if devices % f == 0]
    splits = [(f, devices // f) for f in sorted({*low, *(devices // f for f in low)})]
    return [(f, t) for f, t in splits if not mesh_problems(text, batch_size, f, t, slices)]


def check_mesh(text: dict[str, Any], batch_size: int, fsdp: int, tp: int, slices: int = 1) -> None:
    """Raise RecipeError when the mesh does not divide the model or the micro-batch, naming each reason and what would work."""
    problems = mesh_problems(text, batch_size, fsdp, tp, slices)
    if not problems:
        return
    devices = fsdp * tp
    remedies = []
    if not mesh_problems(text, slices * fsdp, fsdp, tp, slices):  # only the batch is at fault
        remedies.append(f"Make train.batch_size / train.micro_batches a multiple of {slices * fsdp}")
    if works := [f"fsdp={f} tp={t}" for f, t in working_meshes(text, batch_size, devices, slices)]:
        remedies.append(f"On {devices} devices these work: {', '.join(works)}")
    remedy = ". Or: ".join(remedies) or f"No mesh of {devices} devices works with {batch_size} rows a micro-batch; change one of the two"
    raise RecipeError(f"mesh fsdp={fsdp} tp={tp}: {'; '.join(problems)}. {remedy}")


def make_mesh(fsdp: int, tp: int, slices: int = 1) -> jax.sharding.Mesh:
    """The (data, fsdp, tp) mesh over all devices of all processes, (fsdp, tp) within a slice.

    Raises RecipeError when their number is not slices × fsdp × tp.
    """
    import jax
    import numpy as np
    from jax.experimental import mesh_utils

    devices = jax.devices()
    if len(devices) != slices * fsdp * tp:
        of_slices = f" on {slices} slices" if slices > 1 else ""
        raise RecipeError(
            f"mesh fsdp={fsdp} tp={tp}{of_slices} needs {slices * fsdp * tp} devices; there are {len(devices)}. Change mesh or cluster"
        )
    kinds = (jax.sharding.AxisType.Auto,) * 3
    if slices == 1:
        return jax.make_mesh((1, fsdp, tp), AXES, axis_types=kinds)
    if len({getattr(device, "slice_index", None) for device in devices}) == slices:  # TPU slices, joined by the data center's network
        placed = mesh_utils.create_hybrid_device_mesh((1, fsdp, tp), (slices, 1, 1), devices)
    else:  # emulated: processes come slice by slice
        ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
        placed = np.array(ordered).reshape(slices, fsdp, tp)
    return jax.sharding.Mesh(placed, AXES, axis_types=kinds)


def named_sharding(path: str, variable: Any, mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    """A parameter's place on the mesh, from the annotation on its nnx variable.

    Raises ModelError naming the parameter when the annotation has another rank than the parameter or does not divide it.
    """
    from jax.sharding import NamedSharding, PartitionSpec

    shape = variable.get_value().shape
    spec = variable.get_metadata().get("out_sharding") or ()
    if spec and len(spec) != len(shape):
        raise ModelError(f"{path} {list(shape)} has {len(shape)} dimensions but is laid out as {spec}")
    for size, axis in zip(shape, spec, strict=False):
        if axis is not None and size % mesh.shape[axis]:
            raise ModelError(f"{path} {list(shape)} laid out as {spec}: {size} is not divisible by {axis}={mesh.shape[axis]}")
    return NamedSharding(mesh, PartitionSpec(*spec))

"""How the model lies on the (fsdp, tp) mesh, as a table, and the checks that run before anything is loaded.

    parameter                 dimensions          on the mesh
    embedding                 [v, d]              (tp, fsdp)
    q; k of global layers     [n, d, h]           (tp, fsdp, -)         LoRA A [d, r] (fsdp, -)     B [r, n, h] (-, tp, -)
    k and v of sliding layers [2, k, d, h]        (-, tp, fsdp, -)      LoRA A [d, r] (fsdp, -)     B [r, 2, k, h] (-, -, tp, -)
    o                         [n, h, d]           (tp, -, fsdp)         LoRA A [n, h, r] (tp, -, -) B [r, d] (-, fsdp)
    gate, up                  [d, f]              (fsdp, tp)            LoRA A [d, r] (fsdp, -)     B [r, f] (-, tp)
    down                      [f, d]              (tp, fsdp)            LoRA A [f, r] (tp, -)       B [r, d] (-, fsdp)
    norms                     [d] or [h]          (tp)
    optimizer state           like its parameter
    tokens and masks          [batch, length]     (fsdp, -)

The specs themselves are Tunix's annotations, which Qwix carries over to LoRA parameters; `named_sharding` reads them and refuses one whose
rank or divisibility is wrong. That mismatch is what stopped the paper's authors (arXiv 2605.25645; since fixed in google/tunix 1138,
1180, 1186).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gemma_ray.errors import ModelError, RecipeError

if TYPE_CHECKING:
    import jax

# What must divide: (what it is, key in config.json, mesh axis).
_DIVISIBLE = (
    ("query heads", "num_attention_heads", "tp"),
    ("KV heads of the sliding-window layers", "num_key_value_heads", "tp"),
    ("KV heads of the global layers", "num_global_key_value_heads", "tp"),
    ("MLP hidden size", "intermediate_size", "tp"),
    ("vocabulary", "vocab_size", "tp"),
    ("embedding size", "hidden_size", "tp"),
    ("embedding size", "hidden_size", "fsdp"),
)


def mesh_problems(text: dict[str, Any], batch_size: int, fsdp: int, tp: int) -> list[str]:
    """Why a mesh does not suit a model and a batch, one sentence a reason; empty when it does. `text` is config.json's text part."""
    axes = {"fsdp": fsdp, "tp": tp}
    problems = [
        f"{what} {text[key]} are not divisible by {axis}={axes[axis]}"
        for what, key, axis in _DIVISIBLE
        if text.get(key) is not None and text[key] % axes[axis]
    ]
    if batch_size % fsdp:
        problems.append(f"train.batch_size {batch_size} is not divisible by fsdp={fsdp}")
    return problems


def check_mesh(text: dict[str, Any], batch_size: int, fsdp: int, tp: int) -> None:
    """Raise RecipeError when the mesh does not divide the model or the batch, naming each reason and the meshes that would work."""
    problems = mesh_problems(text, batch_size, fsdp, tp)
    if not problems:
        return
    devices = fsdp * tp
    splits = [(f, devices // f) for f in range(1, devices + 1) if devices % f == 0]
    works = [f"fsdp={f} tp={t}" for f, t in splits if not mesh_problems(text, batch_size, f, t)]
    remedy = f"On {devices} devices these work: {', '.join(works)}" if works else f"No mesh of {devices} devices works; use another number"
    raise RecipeError(f"mesh fsdp={fsdp} tp={tp}: {'; '.join(problems)}. {remedy}")


def make_mesh(fsdp: int, tp: int) -> jax.sharding.Mesh:
    """The (fsdp, tp) mesh over all devices of all processes. Raises RecipeError when their number is not fsdp × tp."""
    import jax

    if jax.device_count() != fsdp * tp:
        raise RecipeError(f"mesh fsdp={fsdp} tp={tp} needs {fsdp * tp} devices; there are {jax.device_count()}. Change mesh or cluster")
    return jax.make_mesh((fsdp, tp), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


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

"""LoRA by Qwix on a Tunix model: which modules get an adapter, and how it is initialised on a mesh of many processes.

Qwix's own `apply_lora_to_model` runs the model eagerly, which arrays spread over several processes do not allow. So the structure is built
under `nnx.eval_shape`, without a single number; base weights come from files; and A and B are initialised inside one jitted function whose
output shardings are the adapter's own. A starts He-uniform and B at zero (Hu et al. 2021, arXiv 2106.09685): the tuned model starts as
the base.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from gemma_ray.training.config import LoraConfig

if TYPE_CHECKING:
    import jax
    from flax import nnx

# Hugging Face's projection → the Tunix modules that hold it. The global layers keep K alone (`k_einsum`), the others K and V in one.
MODULES = {
    "q_proj": ("q_einsum",),
    "k_proj": ("k_einsum", "kv_einsum"),
    "v_proj": ("k_einsum", "kv_einsum"),
    "o_proj": ("attn_vec_einsum",),
    "gate_proj": ("gate_proj",),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}


def module_pattern(targets: tuple[str, ...]) -> str:
    """The regular expression of module paths that Qwix matches."""
    modules = sorted({module for target in targets for module in MODULES[target]})
    return f".*({'|'.join(modules)})"


def add_lora(model: nnx.Module, config: LoraConfig) -> nnx.Module:
    """The model with LoRA parameters beside its targets; call it under `nnx.eval_shape`."""
    import qwix
    from flax import nnx

    from gemma_ray.training.dropout import LoraProvider

    pattern, alpha = module_pattern(config.targets), config.scale * config.rank  # Qwix scales by alpha / rank
    provider = LoraProvider(module_path=pattern, rank=config.rank, alpha=alpha, dropout=config.dropout)
    inputs = model.get_model_input()  # type: ignore[attr-defined]
    # Qwix adds the adapter to what this method calls; logits are computed from what it returns.
    adapted: Any = qwix.apply_lora_to_model(model, provider, **inputs, methods=("hidden_states",), rngs=nnx.Rngs(params=0))
    return adapted


def initial_lora(abstract: dict[str, jax.ShapeDtypeStruct], seed: int) -> dict[str, Any]:
    """A and B by path as sharded arrays: A He-uniform from `seed` and the path, B zero. The numbers do not depend on the mesh."""
    import jax

    he_uniform = jax.nn.initializers.he_uniform()

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {
            path: he_uniform(jax.random.fold_in(key, zlib.crc32(path.encode())), leaf.shape, leaf.dtype)
            if path.endswith("_lora_a")
            else jax.numpy.zeros(leaf.shape, leaf.dtype)
            for path, leaf in abstract.items()
        }

    shardings = {path: leaf.sharding for path, leaf in abstract.items()}
    return jax.jit(init, out_shardings=shardings)(jax.random.key(seed))

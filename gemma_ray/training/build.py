"""The model as it is trained: base weights from files on the mesh, with or without an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_ray.models.gemma4 import read_text_config, tunix_config
from gemma_ray.models.loading import load_state
from gemma_ray.models.parameter_map import gemma4_rows, unread_tensors
from gemma_ray.models.quick_tracing import quick_tracing
from gemma_ray.training.config import LoraConfig
from gemma_ray.training.lora import add_lora, initial_lora
from gemma_ray.training.sharding import named_sharding
from gemma_ray.training.targets import target_table

if TYPE_CHECKING:
    import jax
    from flax import nnx

    from gemma_ray.models.attention import Kernel
    from gemma_ray.models.packed import PackedGemma4


def state_paths(state: Any) -> dict[str, Any]:
    """An nnx state's variables by dotted path."""
    from flax import nnx

    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


@dataclass(frozen=True)
class AbstractModel:
    """A model without numbers: its structure, and shape, dtype and place on the mesh of every parameter by path."""

    graph: Any
    adapter: Any
    base: Any
    adapter_leaves: dict[str, jax.ShapeDtypeStruct]
    base_leaves: dict[str, jax.ShapeDtypeStruct]

    def filled(self, values: dict[str, Any]) -> nnx.Module:
        """The model with a value for every path; arrays, or `ShapeDtypeStruct`s to lower with."""
        from flax import nnx

        def fill(state: Any) -> Any:
            return nnx.from_flat_state([(path, v.replace(values[".".join(map(str, path))])) for path, v in nnx.to_flat_state(state)])

        return nnx.merge(self.graph, fill(self.adapter), fill(self.base))


def abstract_model(text: dict[str, Any], mesh: jax.sharding.Mesh, dtype: str, lora: LoraConfig | None) -> AbstractModel:
    """Structure and sharding of a model from its config.json's text part; nothing is computed or read.

    Raises ModelError when a parameter does not divide over the mesh, or a LoRA target does not reach every layer that has it.
    """
    import jax
    from flax import nnx

    from gemma_ray.models.packed import PackedGemma4

    config = tunix_config(text, dtype)

    def structure() -> nnx.Module:
        model = PackedGemma4(config, rngs=nnx.Rngs(params=0))
        return add_lora(model, lora) if lora else model

    with quick_tracing():
        graph, adapter, base = nnx.split(nnx.eval_shape(structure), nnx.LoRAParam, ...)

    def placed(state: Any, dtype: Any = None) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            path: jax.ShapeDtypeStruct(v.get_value().shape, dtype or v.get_value().dtype, sharding=named_sharding(path, v, mesh))
            for path, v in state_paths(state).items()
        }

    abstract = AbstractModel(graph, adapter, base, placed(adapter, jax.numpy.float32), placed(base))
    if lora:
        target_table(text, lora, abstract.adapter_leaves).check()
    return abstract


def build_model(
    folder: Path,
    mesh: jax.sharding.Mesh,
    dtype: str,
    lora: LoraConfig | None,
    seed: int = 0,
    remat: str = "none",
    kernel: Kernel = "dot",
    splash_block: int | None = None,
) -> PackedGemma4:
    """A Gemma 4 with the folder's weights on `mesh`, and a fresh fp32 adapter when `lora` is given.

    Works with any number of processes: every process calls it with the same arguments. Raises ModelError as `load_state` and
    `abstract_model` do.
    """
    text = read_text_config(folder)
    abstract = abstract_model(text, mesh, dtype, lora)
    values = load_state(folder, gemma4_rows(text), abstract.base_leaves, unread_tensors(text))
    if lora:
        values |= initial_lora(abstract.adapter_leaves, seed)
    model: Any = abstract.filled(values)
    model.run_with(remat, kernel, splash_block)
    return model

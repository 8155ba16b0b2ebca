"""The model as it is trained: base weights from files on the mesh, with or without an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_ray.errors import ModelError
from gemma_ray.models.gemma4 import read_text_config, tunix_config
from gemma_ray.models.loading import load_state
from gemma_ray.models.parameter_map import gemma4_rows
from gemma_ray.training.config import LoraConfig
from gemma_ray.training.lora import add_lora, initial_lora
from gemma_ray.training.sharding import named_sharding

if TYPE_CHECKING:
    import jax
    from flax import nnx


def state_paths(state: Any) -> dict[str, Any]:
    """An nnx state's variables by dotted path."""
    from flax import nnx

    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def build_model(
    folder: Path, mesh: jax.sharding.Mesh, dtype: str, lora: LoraConfig | None, seed: int = 0, remat: str = "none"
) -> nnx.Module:
    """A Tunix Gemma 4 with the folder's weights on `mesh`, and a fresh adapter when `lora` is given.

    Works with any number of processes: every process calls it with the same arguments. Raises ModelError as `load_state` and
    `named_sharding` do, and when a LoRA target matched no module.
    """
    import jax
    from flax import nnx
    from tunix.models.gemma4 import model as tunix_model

    text = read_text_config(folder)
    config = tunix_config(text, dtype)

    def structure() -> nnx.Module:
        model = tunix_model.Gemma4(config, rngs=nnx.Rngs(params=0))
        return add_lora(model, lora) if lora else model

    graph, adapter, base = nnx.split(nnx.eval_shape(structure), nnx.LoRAParam, ...)

    def placed(state: Any) -> dict[str, Any]:
        return {
            path: jax.ShapeDtypeStruct(v.get_value().shape, v.get_value().dtype, sharding=named_sharding(path, v, mesh))
            for path, v in state_paths(state).items()
        }

    values = load_state(folder, gemma4_rows(text), placed(base))
    if lora:
        abstract = placed(adapter)
        _check_targets(lora, abstract)
        values |= initial_lora(abstract, seed)

    def fill(state: Any) -> Any:
        return nnx.from_flat_state([(path, v.replace(values[".".join(map(str, path))])) for path, v in nnx.to_flat_state(state)])

    model = nnx.merge(graph, fill(adapter), fill(base))
    # Set only now: under rematerialisation Qwix would lose the parameters it adds. The config object is shared by all layers.
    config.remat_config = tunix_model.RematConfig[remat.upper()]
    return model


def _check_targets(lora: LoraConfig, abstract: dict[str, Any]) -> None:
    from gemma_ray.training.lora import MODULES

    for target in lora.targets:
        if not any(f".{module}." in path for module in MODULES[target] for path in abstract):
            raise ModelError(f"lora.targets: {target} matched no module of this model")

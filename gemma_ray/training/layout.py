"""What lies on a device before the first step, and whether optimizer state lies where its parameter does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from gemma_ray.errors import ModelError


@dataclass(frozen=True)
class Layout:
    """Parameters in all, and bytes on each device."""

    base_parameters: int
    trained_parameters: int
    base_bytes: int
    adapter_bytes: int
    optimizer_bytes: int

    def parts(self) -> list[tuple[str, int]]:
        """What takes a device's memory between steps, and how many bytes."""
        named = [("weights", self.base_bytes), ("adapter", self.adapter_bytes), ("optimizer", self.optimizer_bytes)]
        return [(name, size) for name, size in named if size]


def layout_of(model: nnx.Module, optimizer: nnx.Optimizer) -> Layout:
    """Count what is there. Raises ModelError when optimizer state lies otherwise than its parameter, or is there for a frozen one."""
    adapter = dict(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)))
    base = {path: v for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param)) if path not in adapter}
    trained = adapter or base
    state = dict(nnx.to_flat_state(nnx.state(optimizer, nnx.OptState)))
    for path, variable in state.items():
        _check(path, variable.get_value(), {path: v.get_value() for path, v in trained.items()})
    return Layout(
        base_parameters=sum(v.get_value().size for v in base.values()),
        trained_parameters=sum(v.get_value().size for v in trained.values()),
        base_bytes=sum(map(_bytes, base.values())),
        adapter_bytes=sum(map(_bytes, adapter.values())),
        optimizer_bytes=sum(map(_bytes, state.values())),
    )


def _check(path: tuple[Any, ...], value: jax.Array, trained: dict[tuple[Any, ...], jax.Array]) -> None:
    """A scalar lies anywhere; an array belongs to the trained parameter whose path ends its own."""
    if value.ndim == 0:
        return
    name = ".".join(map(str, path))
    parameter = next((trained[path[start:]] for start in range(len(path)) if path[start:] in trained), None)
    if parameter is None:
        raise ModelError(f"optimizer state {name} {list(value.shape)} belongs to no trained parameter")
    if value.shape == parameter.shape and not value.sharding.is_equivalent_to(parameter.sharding, value.ndim):
        raise ModelError(
            f"optimizer state {name} {list(value.shape)} is laid out as {value.sharding}, and its parameter as {parameter.sharding}"
        )


def _bytes(variable: Any) -> int:
    value = variable.get_value()
    return math.prod(value.sharding.shard_shape(value.shape)) * value.dtype.itemsize

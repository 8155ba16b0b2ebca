"""Compiling ahead of time: devices that are not there, and what the compiler says of a program for them."""

from __future__ import annotations

import importlib.metadata
import math
import resource
import time
from typing import Any

from gemma_ray.models.axes import AXES
from gemma_ray.planning import hlo

PACKAGES = ("jax", "libtpu", "google-tunix", "qwix", "flax", "optax")
"""What makes the program."""


def tpu_mesh(accelerator: str, topology: str, fsdp: int, tp: int) -> Any:
    """The (fsdp, tp) mesh over the chips of a TPU slice. JAX takes hosts for 2 x 2 chips unless told of a single one."""
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    alone = {"chips_per_host_bounds": (1, 1, 1)} if topology == "1x1" else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=f"{accelerator}:{topology}", **alone).devices
    return Mesh(np.array(devices).reshape(1, fsdp, tp), AXES, axis_types=(AxisType.Auto,) * 3)


def compile_and_read(lowered: Any) -> tuple[hlo.Program, dict[str, Any], float]:
    """Compile; the optimised program, the figures that every result has, by field, and XLA's `optimal_seconds`.

    Raises what JAX raises when it does not compile.
    """
    started = time.perf_counter()
    compiled = lowered.compile()
    compile_s = time.perf_counter() - started
    memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text()
    program = hlo.parse(text)
    figures = {
        "temporary_bytes": memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "flops": cost["flops"],
        "bytes_accessed": cost["bytes accessed"],
        "compile_s": compile_s,
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    return program, figures, cost.get("optimal_seconds", 0.0)


def device_bytes(leaves: Any) -> int:
    """Bytes of one device's shards."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)

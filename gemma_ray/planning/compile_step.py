"""Compiles the trainer's step for a TPU that is not there: `python -m gemma_ray.planning.compile_step JOB.json RESULT.json`.

Runs in an environment with libtpu (`gemma_ray.planning.environment`), in a process of its own: XLA ends a process that it cannot serve.
Model, optimizer and step are the trainer's (`gemma_ray.training`); only the arrays are shapes instead of numbers.
"""

from __future__ import annotations

import importlib.metadata
import resource
import time
from typing import Any

from gemma_ray.planning import hlo
from gemma_ray.planning.child import serve_job
from gemma_ray.planning.job import Compiled, CompileJob, Traffic

PACKAGES = ("jax", "libtpu", "google-tunix", "qwix", "flax", "optax")
SLOWEST = 12


def compile_step(job: CompileJob) -> Compiled:
    """Lower and compile the step, and read what the compiler says. Raises what JAX raises when it does not compile."""
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    devices = topologies.get_topology_desc(platform="tpu", **topology_arguments(job.accelerator, job.topology)).devices
    mesh = Mesh(np.array(devices).reshape(job.fsdp, job.tp), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    with mesh:
        step, batch, sizes = abstract_step(job, mesh)
        lowered = step.lower(batch)
        started = time.perf_counter()
        compiled = lowered.compile()
    compile_s = time.perf_counter() - started
    memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text()
    program = hlo.parse(text)
    cycles = hlo.estimated_cycles(program, slowest=SLOWEST)
    return Compiled(
        **sizes,
        temporary_bytes=memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        flops=cost["flops"],
        loop_flops=hlo.repeated_flops(program),
        bytes_accessed=cost["bytes accessed"],
        optimal_s=cost.get("optimal_seconds", 0.0),
        cycles=cycles.total,
        product_cycles=cycles.products,
        loop_cycles=cycles.repeated,
        kernels=cycles.kernels,
        slowest=cycles.slowest,
        traffic=tuple(
            Traffic(c.kind, c.group_size, c.count, c.payload_bytes, c.link_bytes, c.overlapped, c.exposed_link_bytes)
            for c in hlo.collectives(program)
        ),
        compile_s=compile_s,
        host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        versions=package_versions(),
    )


def topology_arguments(accelerator: str, topology: str) -> dict[str, Any]:
    """A slice as JAX's `get_topology_desc` takes it, which takes hosts for 2 x 2 chips unless told of a single one."""
    alone = {"chips_per_host_bounds": (1, 1, 1)} if topology == "1x1" else {}
    return {"topology_name": f"{accelerator}:{topology}", **alone}


def package_versions() -> dict[str, str]:
    """Of what makes the program."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def abstract_step(job: CompileJob, mesh: Any) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """The trainer's step over shapes, a batch to lower it with, and the bytes a device of what goes in."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    from gemma_ray.models.attention import pick_kernel
    from gemma_ray.models.quick_tracing import quick_tracing
    from gemma_ray.training.build import abstract_model
    from gemma_ray.training.config import LoraConfig, TrainConfig
    from gemma_ray.training.optimizer import build_optimizer
    from gemma_ray.training.sharding import named_sharding
    from gemma_ray.training.step import Step

    lora = LoraConfig(rank=job.rank, alpha=job.alpha, targets=job.targets) if job.mode == "lora" else None
    settings = TrainConfig(clip_norm=1.0 if job.clip else None)
    abstract = abstract_model(job.text, mesh, job.dtype, lora)
    model: Any = abstract.filled({**abstract.adapter_leaves, **abstract.base_leaves})
    platform = mesh.devices.flat[0].platform
    model.run_with(job.remat, pick_kernel(job.attention, platform, job.length, job.text), job.splash_block)
    with quick_tracing():
        trained = nnx.LoRAParam if lora else nnx.Param
        optimizer = nnx.eval_shape(lambda m: nnx.Optimizer(m, build_optimizer(settings), wrt=trained), model)

    def placed(path: tuple[Any, ...], variable: Any) -> Any:
        value = variable.get_value()
        sharding = named_sharding(".".join(map(str, path)), variable, mesh) if value.shape else NamedSharding(mesh, PartitionSpec())
        return variable.replace(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))

    state = nnx.state(optimizer, nnx.OptState)
    nnx.update(optimizer, nnx.from_flat_state([(path, placed(path, v)) for path, v in nnx.to_flat_state(state)]))
    by_row = NamedSharding(mesh, PartitionSpec("fsdp", None))
    kinds = {"tokens": jnp.int32, "loss_mask": jnp.bool_, "positions": jnp.int32, "segments": jnp.int32}
    batch = {name: jax.ShapeDtypeStruct((job.batch_size, job.length), kind, sharding=by_row) for name, kind in kinds.items()}
    base, adapter = list(abstract.base_leaves.values()), list(abstract.adapter_leaves.values())
    sizes = {
        "base_bytes": device_bytes(base),
        "adapter_bytes": device_bytes(adapter),
        "optimizer_bytes": device_bytes(v.get_value() for _, v in nnx.to_flat_state(nnx.state(optimizer, nnx.OptState))),
        "batch_bytes": device_bytes(batch.values()),
        "base_parameters": sum(leaf.size for leaf in base),
        "trained_parameters": sum(leaf.size for leaf in (adapter if lora else base)),
    }
    with quick_tracing():
        return Step(model, optimizer, job.micro_batches, platform), batch, sizes


def device_bytes(leaves: Any) -> int:
    """Bytes of one device's shards."""
    import math

    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


if __name__ == "__main__":
    serve_job(CompileJob, compile_step)

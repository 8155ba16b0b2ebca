"""Compiles the trainer's step for a TPU that is not there: `python -m gemma_ray.planning.compile_step JOB.json RESULT.json`.

Runs in an environment with libtpu (`gemma_ray.planning.environment`), in a process of its own: XLA ends a process that it cannot serve.
Model, optimizer and step are the trainer's (`gemma_ray.training`); only the arrays are shapes instead of numbers.
"""

from __future__ import annotations

from typing import Any

from gemma_ray.planning import hlo
from gemma_ray.planning.ahead import compile_and_read, device_bytes, tpu_mesh
from gemma_ray.planning.child import serve_job
from gemma_ray.planning.job import Compiled, CompileJob, Traffic

SLOWEST = 12


def compile_step(job: CompileJob) -> Compiled:
    """Lower and compile the step, and read what the compiler says. Raises what JAX raises when it does not compile."""
    mesh = tpu_mesh(job.accelerator, job.topology, job.fsdp, job.tp)
    with mesh:
        step, batch, sizes = abstract_step(job, mesh)
        program, figures, optimal_s = compile_and_read(step.lower(batch))
    cycles = hlo.estimated_cycles(program, slowest=SLOWEST)
    return Compiled(
        **sizes,
        **figures,
        loop_flops=hlo.repeated_flops(program),
        optimal_s=optimal_s,
        cycles=cycles.total,
        product_cycles=cycles.products,
        loop_cycles=cycles.repeated,
        kernels=cycles.kernels,
        slowest=cycles.slowest,
        traffic=tuple(
            Traffic(c.kind, c.group_size, c.count, c.payload_bytes, c.link_bytes, c.overlapped, c.exposed_link_bytes)
            for c in hlo.collectives(program)
        ),
    )


def abstract_step(job: CompileJob, mesh: Any) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """The trainer's step over shapes, a batch to lower it with, and the bytes a device of what goes in."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    from gemma_ray.models.attention import pick_kernel
    from gemma_ray.models.axes import ROWS_OVER
    from gemma_ray.models.quick_tracing import quick_tracing
    from gemma_ray.training.build import abstract_model
    from gemma_ray.training.config import LoraConfig, TrainConfig
    from gemma_ray.training.optimizer import build_optimizer
    from gemma_ray.training.sharding import named_sharding
    from gemma_ray.training.step import Step

    lora = LoraConfig(rank=job.rank, alpha=job.alpha, targets=job.targets, dropout=job.dropout) if job.mode == "lora" else None
    settings = TrainConfig.model_validate({"clip_norm": 1.0 if job.clip else None, "optimizer": job.optimizer})
    abstract = abstract_model(job.text, mesh, job.dtype, lora)
    model: Any = abstract.filled({**abstract.adapter_leaves, **abstract.base_leaves})
    device = mesh.devices.flat[0]
    model.run_with(job.remat, pick_kernel(job.attention, device.platform, job.length, job.text), job.splash_block)
    with quick_tracing():
        trained = nnx.LoRAParam if lora else nnx.Param
        optimizer = nnx.eval_shape(lambda m: nnx.Optimizer(m, build_optimizer(settings), wrt=trained), model)

    def placed(path: tuple[Any, ...], variable: Any) -> Any:
        value = variable.get_value()
        sharding = named_sharding(".".join(map(str, path)), variable, mesh) if value.shape else NamedSharding(mesh, PartitionSpec())
        return variable.replace(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))

    state = nnx.state(optimizer, nnx.OptState)
    nnx.update(optimizer, nnx.from_flat_state([(path, placed(path, v)) for path, v in nnx.to_flat_state(state)]))
    by_row = NamedSharding(mesh, PartitionSpec(ROWS_OVER, None))
    kinds = {"tokens": jnp.int32, "loss_mask": jnp.bool_, "scopes": jnp.int8, "positions": jnp.int32, "segments": jnp.int32}
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
        return Step(model, optimizer, job.micro_batches, device.device_kind, 0 if lora and lora.dropout else None), batch, sizes


if __name__ == "__main__":
    serve_job(CompileJob, compile_step)

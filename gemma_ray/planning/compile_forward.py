"""Compiles a prefill or decode step for a TPU that is not there: `python -m gemma_ray.planning.compile_forward JOB.json RESULT.json`.

Evidence for a serving plan, not the server's own program: Tunix's Gemma 4 with its key-value cache, plain attention and its own sharding
over tp. vLLM-TPU has paged attention kernels instead. As in vLLM, KV heads that are fewer than tp are repeated until each device has one.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

from gemma_ray.planning import hlo
from gemma_ray.planning.ahead import compile_and_read, device_bytes, tpu_mesh
from gemma_ray.planning.child import serve_job
from gemma_ray.planning.job import CompiledForward, ForwardJob


def compile_forward(job: ForwardJob) -> CompiledForward:
    """Lower and compile the step, and read what the compiler says. Raises what JAX raises when it does not compile."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec
    from tunix.models.gemma4 import model as tunix_model

    from gemma_ray.models.gemma4 import tunix_config
    from gemma_ray.models.quick_tracing import quick_tracing
    from gemma_ray.planning.sizes import layers

    mesh = tpu_mesh(job.accelerator, job.topology, 1, job.chips)
    sharding = tunix_model.ShardingConfig.get_default_sharding(is_sampling=True)
    text = with_repeated_heads(job.text, job.chips)
    config = dataclasses.replace(tunix_config(text, "bfloat16"), use_sliding_window_kv_cache=True, shd_config=sharding)

    def place(shape: tuple[int, ...], axes: Any) -> NamedSharding:
        """Over the axes that divide the shape; replicated over others."""
        divide = [axis if axis and size % mesh.shape[axis] == 0 else None for size, axis in zip(shape, axes, strict=False)]
        return NamedSharding(mesh, PartitionSpec(*divide))

    def laid_out(shape: tuple[int, ...], dtype: Any, axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place(shape, axes))

    def parameter(variable: Any) -> Any:
        value = variable.get_value()
        return variable.replace(laid_out(value.shape, value.dtype, variable.get_metadata().get("out_sharding") or ()))

    def shard(x: Any, axes: Any, eager: bool = False) -> Any:
        """Upstream's, which does nothing where there is no TPU, and refuses what does not divide."""
        del eager
        return jax.lax.with_sharding_constraint(x, place(x.shape, axes))

    with mesh, quick_tracing(), mock.patch.object(tunix_model, "shard", shard):
        graph, state = nnx.split(nnx.eval_shape(lambda: tunix_model.Gemma4(config, rngs=nnx.Rngs(params=0))))
        weights = nnx.from_flat_state([(path, parameter(v)) for path, v in nnx.to_flat_state(state)])
        cache = {}
        for i, layer in enumerate(layers(text)):
            if layer.makes_kv:
                kept = job.context if layer.is_global else min(job.context, job.text["sliding_window"])
                held = laid_out((job.batch, kept, layer.kv_heads, layer.head_dim), jnp.bfloat16, ("fsdp", None, "tp", None))
                cache[f"layer_{i}"] = {"k": held, "v": held, "end_index": laid_out((job.batch,), jnp.int32, ())}
        tokens = laid_out((job.batch, job.tokens), jnp.int32, ())
        mask = laid_out((job.batch, job.tokens, job.context), jnp.bool_, ())

        def step(weights: Any, cache: Any, tokens: Any, positions: Any, mask: Any) -> Any:
            return nnx.merge(graph, weights)(tokens, positions, cache, mask, decode_only_last_token=True)

        program, figures, _ = compile_and_read(jax.jit(step, donate_argnums=1).lower(weights, cache, tokens, tokens, mask))
    traffic = hlo.collectives(program)
    return CompiledForward(
        **figures,
        weight_bytes=device_bytes(v.get_value() for _, v in nnx.to_flat_state(weights)),
        cache_bytes=device_bytes(jax.tree.leaves(cache)),
        cycles=hlo.estimated_cycles(program, slowest=0).total,
        collectives=sum(c.count for c in traffic),
        link_bytes=sum(c.link_bytes for c in traffic),
    )


def with_repeated_heads(text: dict[str, Any], tp: int) -> dict[str, Any]:
    """The model with KV heads enough that each device has one, as vLLM repeats them; what they compute is the same."""
    counts = {name: text.get(name) for name in ("num_key_value_heads", "num_global_key_value_heads")}
    return {**text, **{name: max(count, tp) for name, count in counts.items() if count}}


if __name__ == "__main__":
    serve_job(ForwardJob, compile_forward)

"""Global batches: the same rows on the same step whatever the topology.

Tunix's trainer shards a process's *local* rows against the *global* axis size; when they do not divide, it silently replicates, with
different data on each process (tunix.sft.sharding_utils.get_sharding). So batches are placed here instead: every process reads the global
batch, which is small next to the step, and keeps the rows of its own devices. `check_same_batch` compares content across processes before
the first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gemma_ray.errors import StageError

if TYPE_CHECKING:
    import jax


def place_batch(batch: dict[str, np.ndarray], mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """A global batch [batch, length] of NumPy arrays as arrays sharded over `fsdp`; each process passes the whole batch."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    return {key: jax.make_array_from_callback(rows.shape, sharding, lambda index, rows=rows: rows[index]) for key, rows in batch.items()}


def batch_checksum(tokens: Any) -> Any:
    """A number that changes when a token, or its place in the batch, changes; works on NumPy and JAX arrays alike (uint32 arithmetic)."""
    rows, length = tokens.shape
    xp = np if isinstance(tokens, np.ndarray) else _jax_numpy()
    weights = (xp.arange(rows * length, dtype=xp.uint32) * xp.uint32(2654435761) + xp.uint32(12345)).reshape(rows, length)
    return ((tokens.astype(xp.uint32) + xp.uint32(1)) * weights).sum(dtype=xp.uint32)


def check_same_batch(batch: dict[str, np.ndarray], placed: dict[str, Any]) -> None:
    """Raise StageError unless the placed global batch is, row by row, the batch that this process read."""
    import jax

    expected = int(batch_checksum(batch["tokens"]))
    found = int(jax.jit(batch_checksum)(placed["tokens"]))
    if found != expected:
        raise StageError(
            f"the global batch differs between processes (checksum {found}, here {expected}): the data folder is not the same on every host"
        )


def _jax_numpy() -> Any:
    import jax.numpy as jnp

    return jnp

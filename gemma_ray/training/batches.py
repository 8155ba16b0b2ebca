"""Global batches: the same rows on the same step whatever the topology.

Tunix's trainer shards a process's *local* rows against the *global* axis size; when they do not divide, it silently replicates, with
different data on each process (tunix.sft.sharding_utils.get_sharding). So batches are placed here instead: every process reads the rows of
its own devices (`local_rows`), whatever the mesh, and puts them where they belong in the global batch. `check_same_batch` compares content
across processes before the first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gemma_ray.errors import StageError
from gemma_ray.models.axes import ROWS_OVER

if TYPE_CHECKING:
    import jax


def local_rows(mesh: jax.sharding.Mesh, batch_size: int) -> list[int]:
    """The rows of a global batch that lie on this process's devices, in order. Where tp spans hosts, several processes hold the same."""
    held: Any = _sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return sorted({row for (rows,) in held for row in range(*rows.indices(batch_size))})


def place_batch(batch: dict[str, np.ndarray], mesh: jax.sharding.Mesh, batch_size: int) -> dict[str, Any]:
    """Global arrays [batch_size, length], sharded over `ROWS_OVER`, from this process's `local_rows` of a batch [rows, length]."""
    import jax

    place = {row: i for i, row in enumerate(local_rows(mesh, batch_size))}

    def placed(rows: np.ndarray) -> Any:
        def shard(index: Any) -> np.ndarray:
            return rows[[place[row] for row in range(*index[0].indices(batch_size))]]

        return jax.make_array_from_callback((batch_size, *rows.shape[1:]), _sharding(mesh), shard)

    return {key: placed(rows) for key, rows in batch.items()}


def _sharding(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    from jax.sharding import NamedSharding, PartitionSpec

    return NamedSharding(mesh, PartitionSpec(ROWS_OVER))


def batch_checksum(tokens: Any) -> Any:
    """A number that changes when a token, or its place in the batch, changes; works on NumPy and JAX arrays alike (uint32 arithmetic)."""
    rows, length = tokens.shape
    xp = np if isinstance(tokens, np.ndarray) else _jax_numpy()
    weights = (xp.arange(rows * length, dtype=xp.uint32) * xp.uint32(2654435761) + xp.uint32(12345)).reshape(rows, length)
    return ((tokens.astype(xp.uint32) + xp.uint32(1)) * weights).sum(dtype=xp.uint32)


def check_same_batch(batch: dict[str, np.ndarray], placed: dict[str, Any]) -> None:
    """Raise StageError unless the placed global batch is, row by row, the whole `batch` as this process reads it."""
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

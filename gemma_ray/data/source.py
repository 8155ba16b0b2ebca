"""The Grain pipeline that training reads: shards → shuffled rows → padded global batches, with a state that a checkpoint can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gemma_ray.data.records import unpack_row
from gemma_ray.data.shards import read_manifest
from gemma_ray.errors import DataError


def batches(folder: Path, *, batch_size: int, seq_len: int, seed: int) -> Any:
    """An endless iterator of global batches, reshuffled every epoch; the order is a function of the data and `seed` alone.

    Each is a dictionary of arrays [batch, seq_len]: `tokens` int32, `loss_mask` bool (true where the token is to be predicted), `positions`
    int32 (restarting with each document) and `segments` int32 (equal within a document, 0 on padding). `get_state()` and `set_state()`
    continue exactly where a checkpoint left off.
    Raises DataError when the folder is not prepared data, or its rows are longer than `seq_len`.
    """
    import grain.python as grain

    manifest = read_manifest(folder)
    if manifest.seq_len > seq_len:
        raise DataError(
            f"{folder}: rows of up to {manifest.seq_len} tokens do not fit data.max_seq_len = {seq_len}; prepare the data again"
        )
    source: Any = grain.ArrayRecordDataSource([str(folder / shard.file) for shard in manifest.shards])
    dataset = grain.MapDataset.source(source).shuffle(seed=seed).repeat().map(lambda record: _pad(record, seq_len))
    dataset = dataset.batch(batch_size, drop_remainder=True)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))


def _pad(record: bytes, seq_len: int) -> dict[str, np.ndarray]:
    tokens, loss_mask = unpack_row(record)
    padding = (0, seq_len - len(tokens))
    return {
        "tokens": np.pad(tokens, padding),
        "loss_mask": np.pad(loss_mask, padding),
        "positions": np.pad(np.arange(len(tokens), dtype=np.int32), padding),
        "segments": np.pad(np.ones(len(tokens), np.int32), padding),
    }

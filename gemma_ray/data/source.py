"""The Grain pipeline that training reads: shards → shuffled rows → padded batches, with a state that a checkpoint can hold.

A batch's rows are a function of the data, the seed and the batch's number alone. A host reads the rows that its devices hold, and the state
is the number of the next batch, the same on every host: so training goes on with another number of hosts, and no row is lost or repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemma_ray.data.records import unpack_row
from gemma_ray.data.shards import Manifest, read_manifest
from gemma_ray.errors import DataError

PREFETCHED = 4


def batches(folder: Path, *, batch_size: int, seq_len: int, seed: int, rows: Sequence[int] | None = None) -> Any:
    """An endless iterator of batches, reshuffled every epoch.

    Each is a dictionary of arrays [len(rows), length]: `tokens` int32, `loss_mask` bool (true where the token is to be predicted),
    `positions` int32 (restarting with each document) and `segments` int32 (equal within a document, 0 on padding). `rows` are those of the
    global batch of `batch_size` that are read, all by default; `length` is `seq_len`, or with layout `buckets` that of the batch.
    `get_state()` and `set_state()` continue exactly where a checkpoint left off.
    Raises DataError when the folder is not prepared data, its rows are longer than `seq_len`, or too few for a batch.
    """
    import grain.python as grain

    manifest = read_manifest(folder)
    if manifest.seq_len > seq_len:
        raise DataError(
            f"{folder}: rows of up to {manifest.seq_len} tokens do not fit data.max_seq_len = {seq_len}; prepare the data again"
        )
    source: Any = grain.ArrayRecordDataSource([str(folder / shard.file) for shard in manifest.shards])
    order = _Buckets(manifest, source, batch_size, seed) if manifest.layout == "buckets" else _Shuffled(source, batch_size, seq_len, seed)
    chosen = range(batch_size) if rows is None else rows
    dataset: Any = grain.MapDataset.range(len(order)).map(lambda number: _stacked(order.batch(number, chosen)))
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=PREFETCHED)))


@dataclass(frozen=True)
class _Batch:
    """Records, and the length that they are padded to."""

    records: list[bytes]
    length: int


class _Shuffled:
    """Rows of one length in Grain's shuffled order; a batch may span the border of two epochs."""

    def __init__(self, source: Any, batch_size: int, length: int, seed: int):
        import grain.python as grain

        self.rows: Any = grain.MapDataset.source(source).shuffle(seed=seed).repeat()
        self.batch_size, self.length = batch_size, length

    def __len__(self) -> int:
        return len(self.rows) // self.batch_size

    def batch(self, number: int, rows: Sequence[int]) -> _Batch:
        """Some rows of a batch."""
        return _Batch([self.rows[number * self.batch_size + row] for row in rows], self.length)


class _Buckets:
    """Rows in batches of one length: in every epoch rows are shuffled within their length, and then the batches. Rows that fill no batch of
    their length go with longer ones; fewer than a batch in all wait for another epoch's shuffle."""

    def __init__(self, manifest: Manifest, source: Any, batch_size: int, seed: int):
        self.source, self.batch_size, self.seed = source, batch_size, seed
        runs = [run for shard in manifest.shards for run in sorted(shard.lengths.items())]
        self.lengths = np.repeat([length for length, _ in runs], [rows for _, rows in runs])
        self.per_epoch = len(self.lengths) // batch_size
        if not self.per_epoch:
            raise DataError(f"{len(self.lengths)} rows are not {batch_size} for a batch; lower train.batch_size, or set data.layout=padded")
        self._epoch: tuple[int, list[tuple[np.ndarray, int]]] = (-1, [])

    def __len__(self) -> int:
        return 2**62

    def batch(self, number: int, rows: Sequence[int]) -> _Batch:
        """Some rows of a batch."""
        epoch, place = divmod(number, self.per_epoch)
        members, length = self._batches(epoch)[place]
        return _Batch([self.source[int(members[row])] for row in rows], length)

    def _batches(self, epoch: int) -> list[tuple[np.ndarray, int]]:
        """An epoch's batches: the numbers of their rows, and what those are padded to."""
        kept, found = self._epoch
        if kept == epoch:
            return found
        random = np.random.default_rng([self.seed, epoch])
        found, waiting = [], np.zeros(0, np.int64)
        for length in np.unique(self.lengths).tolist():
            rows = random.permutation(np.r_[waiting, np.flatnonzero(self.lengths == length)])
            whole = len(rows) // self.batch_size * self.batch_size
            found += [(rows[start : start + self.batch_size], length) for start in range(0, whole, self.batch_size)]
            waiting = rows[whole:]
        found = [found[i] for i in random.permutation(len(found))]
        self._epoch = (epoch, found)
        return found


def _stacked(batch: _Batch) -> dict[str, np.ndarray]:
    rows = [padded(record, batch.length) for record in batch.records]
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def padded(record: bytes, length: int) -> dict[str, np.ndarray]:
    """A shard's record as arrays [length] by the names that a batch has."""
    row = unpack_row(record)
    padding = (0, length - len(row.tokens))
    columns = {"tokens": row.tokens, "loss_mask": row.loss, "positions": row.positions, "segments": row.segments}
    return {name: np.pad(column, padding) for name, column in columns.items()}

"""The Grain pipeline that training reads: shards → shuffled rows → padded batches, with a state that a checkpoint can hold.

A batch's rows are a function of the data, the seed and the batch's number alone. A host reads the rows that its devices hold, and the state
is the number of the next batch, the same on every host: so training goes on with another number of hosts, and no row is lost or repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemma_ray.data.records import unpack_row
from gemma_ray.data.shards import Manifest, read_manifest
from gemma_ray.errors import DataError

PREFETCHED = 4


def batches(folder: Path, *, batch_size: int, seq_len: int, seed: int, rows: Sequence[int] | None = None, eval_batches: int = 0) -> Any:
    """An endless iterator of batches, reshuffled every epoch, from all rows but those of `held_out`.

    Each is a dictionary of arrays [len(rows), length]: `tokens` int32, `loss_mask` bool (true where the token is to be predicted),
    `scopes` int8 (its place in `gemma_ray.models.templates.SCOPES`), `positions` int32 (restarting with each document) and `segments` int32
    (equal within a document, 0 on padding). `rows` are those of the global batch of `batch_size` that are read, all by default; `length`
    is `seq_len`, or with layout `buckets` that of the batch. `get_state()` and `set_state()` continue exactly where a checkpoint left off.
    Raises DataError when the folder is not prepared data, its rows are longer than `seq_len`, or too few for a batch.
    """
    import grain.python as grain

    data = _Data(folder, batch_size, seq_len, seed, eval_batches)
    chosen = range(batch_size) if rows is None else rows
    dataset: Any = grain.MapDataset.range(len(data.order)).map(lambda number: _stacked(data.batch(number, chosen)))
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=PREFETCHED)))


def held_out(
    folder: Path, *, batch_size: int, seq_len: int, seed: int, eval_batches: int, rows: Sequence[int] | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """The `eval_batches` batches that `batches` leaves out, drawn by the seed; arguments and errors as there."""
    data = _Data(folder, batch_size, seq_len, seed, eval_batches)
    chosen = range(batch_size) if rows is None else rows
    for numbers in data.held.reshape(eval_batches, batch_size):
        yield _stacked(_Batch([data.source[int(numbers[row])] for row in chosen], seq_len))


def rows_of_batch(folder: Path, number: int, *, batch_size: int, seq_len: int, seed: int, eval_batches: int = 0) -> list[str]:
    """Where the rows of a batch stand, from batch 0: `FILE:ROW`, rows of a file counted from 0."""
    data = _Data(folder, batch_size, seq_len, seed, eval_batches)
    ends = np.cumsum([shard.rows for shard in data.manifest.shards])
    places = [(int(np.searchsorted(ends, row, side="right")), int(row)) for row in data.order.numbers(number)[0]]
    return [f"{data.manifest.shards[shard].file}:{row - int(ends[shard]) + data.manifest.shards[shard].rows}" for shard, row in places]


class _Data:
    """A data folder's rows, and the order in which batches take them."""

    def __init__(self, folder: Path, batch_size: int, seq_len: int, seed: int, eval_batches: int):
        import grain.python as grain

        self.manifest = manifest = read_manifest(folder)
        if manifest.seq_len > seq_len:
            raise DataError(
                f"{folder}: rows of up to {manifest.seq_len} tokens do not fit data.max_seq_len = {seq_len}; prepare the data again"
            )
        self.source: Any = grain.ArrayRecordDataSource([str(folder / shard.file) for shard in manifest.shards])
        total, held = len(self.source), eval_batches * batch_size
        if total - held < (batch_size if held else 1):
            raise DataError(
                f"{folder}: {total} rows do not leave a batch of {batch_size} when train.eval_batches = {eval_batches} holds out {held}; "
                "lower train.eval_batches or train.batch_size, or prepare more data"
            )
        mixed = np.random.default_rng([seed, 0xE7A1]).permutation(total)
        self.held, kept = mixed[:held], np.sort(mixed[held:])
        kind = _Buckets if manifest.layout == "buckets" else _Shuffled
        self.order: _Buckets | _Shuffled = kind(manifest, kept, batch_size, seq_len, seed)

    def batch(self, number: int, rows: Sequence[int]) -> _Batch:
        """Some rows of a batch."""
        members, length = self.order.numbers(number)
        return _Batch([self.source[int(members[row])] for row in rows], length)


@dataclass(frozen=True)
class _Batch:
    """Records, and the length that they are padded to."""

    records: list[bytes]
    length: int


class _Shuffled:
    """Rows of one length in Grain's shuffled order; a batch may span the border of two epochs."""

    def __init__(self, manifest: Manifest, kept: np.ndarray, batch_size: int, length: int, seed: int):
        import grain.python as grain

        del manifest
        rows: Any = kept
        self.rows: Any = grain.MapDataset.source(rows).shuffle(seed=seed).repeat()
        self.batch_size, self.length = batch_size, length

    def __len__(self) -> int:
        return len(self.rows) // self.batch_size

    def numbers(self, number: int) -> tuple[Sequence[int], int]:
        """The rows of a batch, and what they are padded to."""
        return [self.rows[number * self.batch_size + row] for row in range(self.batch_size)], self.length


class _Buckets:
    """Rows in batches of one length: in every epoch rows are shuffled within their length, and then the batches. Rows that fill no batch of
    their length go with longer ones; fewer than a batch in all wait for another epoch's shuffle."""

    def __init__(self, manifest: Manifest, kept: np.ndarray, batch_size: int, length: int, seed: int):
        del length
        self.batch_size, self.seed, self.kept = batch_size, seed, kept
        runs = [run for shard in manifest.shards for run in sorted(shard.lengths.items())]
        self.lengths = np.repeat([length for length, _ in runs], [rows for _, rows in runs])[kept]
        self.per_epoch = len(self.lengths) // batch_size
        if not self.per_epoch:
            raise DataError(f"{len(self.lengths)} rows are not {batch_size} for a batch; lower train.batch_size, or set data.layout=padded")
        self._epoch: tuple[int, list[tuple[np.ndarray, int]]] = (-1, [])

    def __len__(self) -> int:
        return 2**62

    def numbers(self, number: int) -> tuple[np.ndarray, int]:
        """The rows of a batch, and what they are padded to."""
        epoch, place = divmod(number, self.per_epoch)
        members, length = self._batches(epoch)[place]
        return self.kept[members], length

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
    columns = {"tokens": row.tokens, "loss_mask": row.loss, "scopes": row.scopes, "positions": row.positions, "segments": row.segments}
    return {name: np.pad(column, padding) for name, column in columns.items()}

"""The third pass: the examples of one shard, packed into rows and written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from gemma_ray.artifacts import write_json
from gemma_ray.data.chunks import Chunk, chunk_name
from gemma_ray.data.config import DataConfig, Layout
from gemma_ray.data.packing import bucket_lengths, pack
from gemma_ray.data.records import pack_row, unpack_row
from gemma_ray.data.selection import Selection
from gemma_ray.data.shards import Shard, shard_name, write_shard

HISTOGRAM = 32
RESULT = "data"
"""Folder of the finished shards, inside the folder of the work."""


@dataclass(frozen=True)
class ShardJob:
    """Called with a shard's number and its examples' places it writes the shard, and after it the shard's description."""

    config: DataConfig
    folder: Path
    """Where chunks are. Shards go into its folder `RESULT`, descriptions beside the chunks."""
    shards: int

    def __call__(self, number: int, places: tuple[np.ndarray, np.ndarray]) -> None:
        """Raises OSError when the shard cannot be written."""
        chunks = {int(i): Chunk(self.folder / chunk_name(int(i))) for i in np.unique(places[0])}
        documents = [document for i, row in zip(*places, strict=True) for document in unpack_row(chunks[int(i)].row(int(row))).documents()]
        lengths = [len(document.ids) for document in documents]
        rows = rows_of(lengths, self.config.layout, self.config.max_seq_len)
        path = self.folder / RESULT / shard_name(number, self.shards)
        sha256 = write_shard(path, [pack_row([documents[i] for i in members]) for members, _ in rows])
        padded = Counter(length for _, length in rows)
        loss = sum(int(document.loss.sum()) for document in documents)
        shard = Shard(path.name, len(rows), sha256, len(documents), sum(lengths), loss, dict(sorted(padded.items())))
        write_json(self.folder / f"{path.name}.json", asdict(shard))


def rows_of(lengths: Sequence[int], layout: Layout, seq_len: int) -> list[tuple[list[int], int]]:
    """The rows of a shard: the numbers of their examples, and what each is padded to. Shorter ones come first, so that `Shard.lengths`
    tells every row's."""
    if layout == "packed":
        return [(members, seq_len) for members in pack(lengths, seq_len)]
    widths = bucket_lengths(seq_len) if layout == "buckets" else [seq_len]
    padded = [next(width for width in widths if width >= length) for length in lengths]
    return [([i], padded[i]) for i in sorted(range(len(lengths)), key=padded.__getitem__)]


def shard_of(path: Path) -> Shard:
    """A finished shard, from its description's file."""
    return TypeAdapter(Shard).validate_json(path.read_bytes())


def example_lengths(chunks: Sequence[Chunk], chosen: Selection, seq_len: int) -> dict[int, int]:
    """Examples that stay by tokens, rounded up to a 32nd of a row."""
    step = -(-seq_len // HISTOGRAM)
    lengths = chosen.numbers(chunks, "length").astype(np.int64)
    rounded, counts = np.unique(-(-lengths // step) * step, return_counts=True)
    return dict(zip(rounded.tolist(), counts.tolist(), strict=True))

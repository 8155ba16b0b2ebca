"""The second pass: which of the clean examples stay, and which shard each goes to. It reads numbers alone, a few bytes an example.

An example is a duplicate when an earlier one has the same tokens, and a near duplicate when an earlier one that stays is about as alike as
`data.near_duplicates` says. Pairs are found by bands of the MinHash signature (Leskovec et al., Mining of Massive Datasets, ch. 3.4) and
compared by the whole of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gemma_ray.data.chunks import Chunk
from gemma_ray.data.grams import SIGNATURE

BANDS = 16
"""Of four numbers each: a pair that is 0.9 alike is found with certainty but for 3e-8, one that is 0.7 alike with 99 %."""


@dataclass(frozen=True)
class Selection:
    """`chunk` and `row` [kept] say where the examples that stay are, in order; `duplicates` [n, 3] are chunk, row and number of the example
    that each repeats, counted over all clean ones; `near` the same of near duplicates."""

    chunk: np.ndarray
    row: np.ndarray
    duplicates: np.ndarray
    near: np.ndarray
    clean: np.ndarray
    """[clean, 2] chunk and row of all of them."""

    def numbers(self, chunks: Sequence[Chunk], name: str) -> np.ndarray:
        """[kept] a column's numbers of the examples that stay."""
        rows = np.split(self.row, np.searchsorted(self.chunk, np.arange(1, len(chunks))))
        return np.concatenate([chunk.numbers(name)[mine] for chunk, mine in zip(chunks, rows, strict=True)])


def select(chunks: Sequence[Chunk], near: float | None) -> Selection:
    """Choose among the clean examples of chunks in order; a function of them alone."""
    where, keys = [], []
    for i, chunk in enumerate(chunks):
        rows = np.flatnonzero(chunk.numbers("length"))
        where.append(np.stack([np.full(len(rows), i), rows], axis=1))
        keys.append(chunk.numbers("key")[rows])
    clean = np.concatenate(where) if where else np.zeros((0, 2), np.int64)
    _, first, inverse = np.unique(np.concatenate(keys) if keys else np.zeros(0, np.uint64), return_index=True, return_inverse=True)
    original = first[inverse] if len(clean) else np.zeros(0, np.int64)
    same = np.flatnonzero(original != np.arange(len(clean)))
    kept = np.ones(len(clean), bool)
    kept[same] = False
    alike = _near_duplicates(chunks, clean, kept, near) if near is not None else {}
    kept[list(alike)] = False
    return Selection(
        chunk=clean[kept, 0],
        row=clean[kept, 1],
        duplicates=np.column_stack([clean[same], original[same]]).astype(np.int64),
        near=np.array([[*clean[i], j] for i, j in alike.items()], np.int64).reshape(-1, 3),
        clean=clean,
    )


def _near_duplicates(chunks: Sequence[Chunk], clean: np.ndarray, kept: np.ndarray, near: float) -> dict[int, int]:
    """Examples that are like an earlier one that stays, and which that is."""
    marks = _Signatures(chunks, clean)
    pairs = np.unique(np.concatenate([_candidates(marks.band(band), kept) for band in range(BANDS)]), axis=0)
    alike: dict[int, int] = {}
    for later, earlier in pairs.tolist():
        if later not in alike and earlier not in alike and marks.similarity(later, earlier) >= near:
            alike[later] = earlier
    return alike


def _candidates(band: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """[pairs, 2]: each example that shares its band's number with an earlier one, with the first and with the last before it that do."""
    at = np.flatnonzero(kept)
    order = at[np.argsort(band[at], kind="stable")]
    values = band[order]
    begins = np.r_[True, values[1:] != values[:-1]] if len(values) else np.zeros(0, bool)
    first = order[begins][np.cumsum(begins) - 1]
    before = np.r_[0, order[:-1]] if len(order) else order
    later = ~begins
    return np.concatenate([np.column_stack([order[later], first[later]]), np.column_stack([order[later], before[later]])])


class _Signatures:
    """The signatures of the clean examples, left in their files until asked for."""

    def __init__(self, chunks: Sequence[Chunk], clean: np.ndarray):
        self.chunks, self.clean = chunks, clean
        self.rows = np.split(clean[:, 1], np.searchsorted(clean[:, 0], np.arange(1, len(chunks))))

    def band(self, band: int) -> np.ndarray:
        """[clean] uint64: one band of every signature as a number."""
        size = SIGNATURE // BANDS
        parts = [np.zeros(0, np.uint64)]
        for chunk, rows in zip(self.chunks, self.rows, strict=True):
            numbers = chunk.signatures()[rows, band * size : (band + 1) * size].astype(np.uint64)
            parts.append(numbers @ (np.uint64(0x9E3779B97F4A7C15) ** np.arange(1, size + 1, dtype=np.uint64)))
        return np.concatenate(parts)

    def similarity(self, a: int, b: int) -> float:
        """Share of equal numbers in two signatures."""
        one, other = (self.chunks[chunk].signatures()[row] for chunk, row in (self.clean[a], self.clean[b]))
        return float((one == other).mean())


def shards(selection: Selection, rows_per_shard: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Chunk and row of each shard's examples."""
    for start in range(0, len(selection.chunk), rows_per_shard):
        part = slice(start, start + rows_per_shard)
        yield selection.chunk[part], selection.row[part]

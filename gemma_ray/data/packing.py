"""Which examples share a row, and which lengths rows have.

layout     a row                                       rows are padded to
packed     as many examples as fit, none cut           max_seq_len
buckets    one example                                 the least of `bucket_lengths` that holds it; a batch has one length
padded     one example                                 max_seq_len
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BUCKETS = 8
LEAST_BUCKET = 128


def pack(lengths: Sequence[int], row: int) -> list[list[int]]:
    """Examples, by number, of each row of `row` tokens: first-fit decreasing, which uses at most 11/9 of the fewest rows and one more
    (Johnson 1973). Rows are in the order of their first example, and so are the examples in each. No length may exceed `row`."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows: list[list[int]] = []
    room = _Room(len(lengths), row)
    for i in order:
        place = room.first(lengths[i])
        if place == len(rows):
            rows.append([])
        rows[place].append(i)
        room.take(place, lengths[i])
    return sorted((sorted(members) for members in rows), key=lambda members: members[0])


class _Room:
    """Free tokens of rows, as a tree of maxima: the first row with enough room is found in logarithmic time."""

    def __init__(self, rows: int, size: int):
        self.leaves = 1 << max(rows - 1, 0).bit_length()
        self.most = np.full(2 * self.leaves, size, np.int64)

    def first(self, length: int) -> int:
        node = 1
        while node < self.leaves:
            node = 2 * node if self.most[2 * node] >= length else 2 * node + 1
        return node - self.leaves

    def take(self, place: int, length: int) -> None:
        node = place + self.leaves
        self.most[node] -= length
        while node > 1:
            node //= 2
            self.most[node] = max(self.most[2 * node], self.most[2 * node + 1])


def bucket_lengths(max_seq_len: int) -> tuple[int, ...]:
    """Lengths that rows are padded to: `max_seq_len` in `BUCKETS` equal steps of multiples of 128, fewer where it is short."""
    step = max(LEAST_BUCKET, -(-max_seq_len // BUCKETS // LEAST_BUCKET) * LEAST_BUCKET)
    return (*(n for n in range(step, max_seq_len, step)), max_seq_len)

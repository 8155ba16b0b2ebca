"""One training row as bytes in an ArrayRecord shard: its documents, their tokens, and three bits a token.

uint32 documents │ uint32 × documents lengths │ uint32 × sum tokens │ 3 × ceil(sum / 8) bytes, most significant bit first: does it bear
loss, would it in the scope `assistant`, would it in `final_answer`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gemma_ray.errors import DataError
from gemma_ray.models.templates import Tokens


@dataclass(frozen=True)
class Row:
    """A row's documents end to end: tokens [length] int32, loss [length] bool, scopes [length] int8 (`SCOPES`), and the documents' lengths."""

    tokens: np.ndarray
    loss: np.ndarray
    scopes: np.ndarray
    lengths: np.ndarray

    def documents(self) -> Iterator[Tokens]:
        """Its documents, one by one."""
        ends = np.cumsum(self.lengths)
        for start, end in zip(ends - self.lengths, ends, strict=True):
            yield Tokens(self.tokens[start:end], self.loss[start:end], self.scopes[start:end])

    @property
    def segments(self) -> np.ndarray:
        """[length] int32: the number of each token's document, from 1."""
        return np.repeat(np.arange(1, len(self.lengths) + 1, dtype=np.int32), self.lengths)

    @property
    def positions(self) -> np.ndarray:
        """[length] int32: each token's place in its document, from 0."""
        starts = np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        return (np.arange(len(self.tokens)) - starts).astype(np.int32)


def pack_row(documents: Sequence[Tokens]) -> bytes:
    """Documents as the bytes of one row."""
    header = np.array([len(documents), *(len(document.ids) for document in documents)], "<u4")
    tokens = np.concatenate([document.ids for document in documents]).astype("<u4")
    loss = np.concatenate([document.loss for document in documents])
    scopes = np.concatenate([np.zeros(len(d.ids), np.int8) if d.scopes is None else d.scopes for d in documents])
    return header.tobytes() + tokens.tobytes() + np.packbits([loss, scopes >= 1, scopes >= 2], axis=1).tobytes()


def unpack_row(record: bytes) -> Row:
    """The inverse. Raises DataError for bytes that are no row."""
    words = np.frombuffer(record[: len(record) // 4 * 4], "<u4")
    count = int(words[0]) if len(words) else -1
    lengths = words[1 : 1 + count].astype(np.int64)
    total, start = int(lengths.sum()), 4 * (1 + count)
    if count < 0 or len(lengths) != count or len(record) != start + 4 * total + 3 * ((total + 7) // 8):
        raise DataError("a shard holds a record that is not a training row; remove the data folder and run `gemma-ray data prepare`")
    tokens = np.frombuffer(record, "<u4", count=total, offset=start).astype(np.int32)
    bits = np.frombuffer(record, np.uint8, offset=start + 4 * total).reshape(3, -1)
    loss, said, answered = np.unpackbits(bits, axis=1, count=total)
    return Row(tokens, loss.astype(bool), (said + answered).astype(np.int8), lengths)

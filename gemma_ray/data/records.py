"""One training row as bytes in an ArrayRecord shard: its length, its tokens, and one bit a token for the loss.

uint32 length │ uint32 × length tokens │ ceil(length / 8) bytes, most significant bit first: does this token bear loss
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gemma_ray.errors import DataError


def pack_row(tokens: Sequence[int], loss_mask: Sequence[bool]) -> bytes:
    """A row as bytes; `tokens` and `loss_mask` are equally long."""
    length = np.array([len(tokens)], "<u4")
    return length.tobytes() + np.asarray(tokens, "<u4").tobytes() + np.packbits(np.asarray(loss_mask, bool)).tobytes()


def unpack_row(record: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [length] int32 and loss mask [length] bool. Raises DataError for bytes that are no row."""
    length = int(np.frombuffer(record[:4], "<u4")[0]) if len(record) >= 4 else -1
    if length < 0 or len(record) != 4 + 4 * length + (length + 7) // 8:
        raise DataError("a shard holds a record that is not a training row; remove the data folder and run `gemma-ray data prepare`")
    tokens = np.frombuffer(record, "<u4", count=length, offset=4).astype(np.int32)
    bits = np.frombuffer(record, np.uint8, offset=4 + 4 * length)
    return tokens, np.unpackbits(bits, count=length).astype(bool)

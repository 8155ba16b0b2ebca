"""Prepared rows for people: every token, and whether it bears loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gemma_ray.data.records import unpack_row
from gemma_ray.data.shards import check_shards, read_manifest
from gemma_ray.errors import DataError
from gemma_ray.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class ShownToken:
    """One token as text, its id, and whether it bears loss."""

    text: str
    id: int
    bears_loss: bool


def shown_rows(folder: Path, model: Path, count: int) -> list[list[ShownToken]]:
    """The first `count` rows of a data folder, decoded with the tokenizer of a model folder.

    Raises DataError or ModelError when either is missing.
    """
    tokenizer = Tokenizer(model)
    return [
        [ShownToken(tokenizer.decode([int(t)]), int(t), bool(m)) for t, m in zip(tokens, mask, strict=True)]
        for tokens, mask in itertools.islice(rows(folder), count)
    ]


def marked_text(row: list[ShownToken], color: bool) -> str:
    """A row as text, the tokens that bear loss in green (`color`) or between ⟦ and ⟧, token by token."""
    before, after = ("\x1b[32m", "\x1b[0m") if color else ("⟦", "⟧")
    return "".join(f"{before}{token.text}{after}" if token.bears_loss else token.text for token in row)


def loss_free_prefixes(folder: Path, count: int) -> list[list[int]]:
    """The tokens before the first that bears loss, of up to `count` rows with different such prefixes: prompts as the model sees them."""
    prefixes: dict[tuple[int, ...], None] = {}
    for tokens, mask in rows(folder):
        if len(prefixes) == count:
            break
        if mask.any() and not mask[0]:
            prefixes[tuple(tokens[: int(mask.argmax())].tolist())] = None
    if not prefixes:
        raise DataError(f"{folder}: no row begins with a prompt")
    return [list(prefix) for prefix in prefixes]


def rows(folder: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and loss mask of every row of a data folder, in shard order. Raises DataError when it is not prepared data, or damaged."""
    from array_record.python.array_record_module import ArrayRecordReader

    manifest = read_manifest(folder)
    check_shards(folder, manifest)
    for shard in manifest.shards:
        reader = ArrayRecordReader(str(folder / shard.file))
        try:
            for i in range(shard.rows):
                yield unpack_row(reader.read([i])[0])
        finally:
            reader.close()

"""Prepared rows for people: every token, and whether it bears loss."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gemma_ray.data.records import unpack_row
from gemma_ray.data.shards import read_manifest
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
    from array_record.python.array_record_module import ArrayRecordReader

    manifest = read_manifest(folder)
    tokenizer = Tokenizer(model)
    rows: list[list[ShownToken]] = []
    for shard in manifest.shards:
        reader = ArrayRecordReader(str(folder / shard.file))
        for record in reader.read(list(range(min(shard.rows, count - len(rows))))):
            tokens, mask = unpack_row(record)
            rows.append([ShownToken(tokenizer.decode([int(t)]), int(t), bool(m)) for t, m in zip(tokens, mask, strict=True)])
        reader.close()
        if len(rows) == count:
            break
    return rows

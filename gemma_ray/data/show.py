"""Prepared rows for people: every token, whether it bears loss, and where an example ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gemma_ray.data.records import Row, unpack_row
from gemma_ray.data.shards import Manifest, check_shards, read_manifest
from gemma_ray.errors import DataError
from gemma_ray.models.templates import Tokens
from gemma_ray.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class ShownToken:
    """One token as text, its id, and whether it bears loss."""

    text: str
    id: int
    bears_loss: bool


def shown_examples(folder: Path, model: Path, count: int) -> list[list[ShownToken]]:
    """The first `count` examples of a data folder, decoded with the tokenizer of a model folder.

    Raises DataError when the folder is not prepared data or was made with another tokenizer, ModelError when there is none.
    """
    tokenizer = own_tokenizer(folder, model)
    return [shown(tokenizer, found) for found in itertools.islice(examples(folder), count)]


def own_tokenizer(folder: Path, model: Path) -> Tokenizer:
    """The tokenizer of a model folder, which has to be the one that a data folder was made with. Raises DataError when it is another."""
    tokenizer = Tokenizer(model)
    if read_manifest(folder).tokenizer != tokenizer.fingerprint():
        raise DataError(f"{folder} was prepared with another tokenizer than {tokenizer.path}; run `gemma-ray data prepare` again")
    return tokenizer


def shown(tokenizer: Tokenizer, found: Tokens) -> list[ShownToken]:
    """An example token by token."""
    return [ShownToken(tokenizer.decode([int(t)]), int(t), bool(m)) for t, m in zip(found.ids, found.loss, strict=True)]


def marked_text(example: list[ShownToken], color: bool) -> str:
    """An example as text, the tokens that bear loss in green (`color`) or between ⟦ and ⟧, token by token."""
    before, after = ("\x1b[32m", "\x1b[0m") if color else ("⟦", "⟧")
    return "".join(f"{before}{token.text}{after}" if token.bears_loss else token.text for token in example)


def summary(manifest: Manifest, folder: Path) -> str:
    """What was made, in three lines."""
    read = ", ".join(f"{schema} {count}" for schema, count in manifest.schemas.items())
    dropped = ", ".join(f"{reason} {count}" for reason, count in manifest.rows_dropped.items()) or "none"
    share = manifest.loss_tokens / manifest.tokens
    cut = f", {manifest.rows_truncated} of them cut to fit" if manifest.rows_truncated else ""
    return (
        f"examples: {manifest.rows_read} read ({read}), {manifest.rows_kept} kept{cut}; dropped: {dropped}\n"
        f"tokens: {manifest.tokens}, of which {manifest.loss_tokens} ({share:.1%}) bear loss; "
        f"{manifest.sequences} rows, {manifest.padding_fraction:.1%} of them padding\n"
        f"shards: {len(manifest.shards)} in {folder}"
    )


def loss_free_prefixes(folder: Path, count: int) -> list[list[int]]:
    """The tokens before the first that bears loss, of up to `count` examples with different such prefixes: prompts as models see them."""
    prefixes: dict[tuple[int, ...], None] = {}
    for found in examples(folder):
        if len(prefixes) == count:
            break
        if found.loss.any() and not found.loss[0]:
            prefixes[tuple(found.ids[: int(found.loss.argmax())].tolist())] = None
    if not prefixes:
        raise DataError(f"{folder}: no example begins with a prompt")
    return [list(prefix) for prefix in prefixes]


def examples(folder: Path) -> Iterator[Tokens]:
    """Every example of a data folder, row by row. Raises DataError when it is not prepared data, or damaged."""
    for row in rows(folder):
        yield from row.documents()


def rows(folder: Path) -> Iterator[Row]:
    """Every row of a data folder, in shard order. Raises DataError when it is not prepared data, or damaged."""
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

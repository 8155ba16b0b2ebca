"""The first pass: a chunk of the source read, cleaned, tokenised and kept as one Arrow file, with a row for every entry, dropped ones too.

A chunk's file is a function of the chunk alone and appears whole, so a pass that was killed goes on where it stopped, with any number of
workers.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemma_ray.artifacts import replaced
from gemma_ray.data.cleaning import why_dropped
from gemma_ray.data.config import DataConfig
from gemma_ray.data.contamination import Benchmark
from gemma_ray.data.files import Cut
from gemma_ray.data.grams import SIGNATURE, signature
from gemma_ray.data.readers import Entry, read_cut
from gemma_ray.data.records import pack_row
from gemma_ray.data.schemas import Dropped, Example, read_example, schema_of
from gemma_ray.data.tokenizing import Tokenizing
from gemma_ray.errors import DataError
from gemma_ray.models.templates import Tokens

BATCH = 128
"""Entries that are tokenised at once."""
NO_SIGNATURE = bytes(4 * SIGNATURE)


@dataclass(frozen=True)
class ChunkJob:
    """What is done with each chunk. Called with a chunk's number and cuts it leaves the chunk's file in `folder`."""

    config: DataConfig
    tokenizing: Tokenizing
    benchmarks: tuple[Benchmark, ...]
    folder: Path

    def __call__(self, number: int, cuts: Sequence[Cut]) -> None:
        """Raises DataError for a file that is no data, OSError when the chunk cannot be written."""
        columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        lines, schemas = [0] * len(cuts), Counter[str]()
        for batch in _batched(cuts, lines):
            read = [self._read(entry, schemas) for _, entry in batch]
            examples = [example for example in read if isinstance(example, Example)]
            tokens = iter(self.tokenizing(examples) if examples else [])
            for (cut, entry), example in zip(batch, read, strict=True):
                found = self._columns(example, next(tokens)) if isinstance(example, Example) else _dropped(example)
                for name, value in {"cut": cut, "number": entry.number, **found}.items():
                    columns[name].append(value)
        _write(self.folder / chunk_name(number), columns, {"lines": lines, "schemas": dict(sorted(schemas.items()))})

    def _read(self, entry: Entry, schemas: Counter[str]) -> Example | Dropped:
        if entry.record is None:
            return Dropped("malformed", entry.fault)
        try:
            schema = schema_of(entry.record, self.config.columns)
            schemas[schema] += 1
            found = read_example(entry.record, schema, self.config.columns)
        except DataError as e:
            return Dropped("malformed", str(e))
        if isinstance(found, Dropped):
            return found
        return why_dropped(found, self.config, self.benchmarks) or found

    def _columns(self, example: Example, outcome: Tokens | Dropped) -> dict[str, Any]:
        if isinstance(outcome, Dropped):
            return _dropped(outcome)
        mark = NO_SIGNATURE
        if self.config.near_duplicates is not None:
            mark = signature(self.tokenizing.own_runs(example, outcome.ids)).astype("<u4").tobytes()
        return {
            "reason": "",
            "detail": "",
            "row": pack_row([outcome]),
            "length": len(outcome.ids),
            "loss": int(outcome.loss.sum()),
            "truncated": int(outcome.is_cut),
            "key": int.from_bytes(hashlib.blake2b(outcome.ids.astype("<u4").tobytes(), digest_size=8).digest(), "little"),
            "signature": mark,
        }


def _dropped(found: Dropped) -> dict[str, Any]:
    nothing = {"row": b"", "length": 0, "loss": 0, "truncated": 0, "key": 0, "signature": NO_SIGNATURE}
    return {"reason": found.reason, "detail": found.detail[:400], **nothing}


def _batched(cuts: Sequence[Cut], lines: list[int]) -> Iterator[list[tuple[int, Entry]]]:
    """Entries with their cuts' numbers, some at a time; `lines` counts those of each cut, blank ones too."""
    batch: list[tuple[int, Entry]] = []
    for i, cut in enumerate(cuts):
        for entry in read_cut(cut):
            lines[i] = entry.number
            if entry.is_blank:
                continue
            batch.append((i, entry))
            if len(batch) == BATCH:
                yield batch
                batch = []
    if batch:
        yield batch


def chunk_name(number: int) -> str:
    """The file of a chunk."""
    return f"chunk-{number:06d}.arrow"


COLUMNS = ("cut", "number", "reason", "detail", "row", "length", "loss", "truncated", "key", "signature")


def _write(path: Path, columns: dict[str, list[Any]], notes: dict[str, Any]) -> None:
    import pyarrow as pa

    number, text = pa.uint32(), pa.string()
    kinds = (number, number, text, text, pa.large_binary(), number, number, pa.uint8(), pa.uint64(), pa.binary(4 * SIGNATURE))
    table = pa.table({name: pa.array(columns[name], kind) for name, kind in zip(COLUMNS, kinds, strict=True)})
    table = table.replace_schema_metadata({"notes": json.dumps(notes)}).combine_chunks()
    with replaced(path) as temporary, pa.OSFile(str(temporary), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)


class Chunk:
    """A chunk's file, its columns read as they are asked for."""

    def __init__(self, path: Path):
        """Raises OSError or pyarrow's errors when the file is not one."""
        import pyarrow as pa

        self._table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        notes = json.loads(self._table.schema.metadata[b"notes"])
        self.lines: list[int] = notes["lines"]
        self.schemas: dict[str, int] = notes["schemas"]

    def __len__(self) -> int:
        return self._table.num_rows

    def numbers(self, name: str) -> np.ndarray:
        """A column of numbers."""
        return self._table[name].to_numpy()

    def texts(self, name: str) -> list[str]:
        """A column of text."""
        return self._table[name].to_pylist()

    def signatures(self) -> np.ndarray:
        """[rows, SIGNATURE] uint32."""
        column = self._table["signature"].combine_chunks()
        data = np.frombuffer(column.buffers()[1], "<u4") if len(column) else np.zeros(0, "<u4")
        return data[: len(column) * SIGNATURE].reshape(len(column), SIGNATURE)

    def row(self, i: int) -> bytes:
        """A packed row of one document."""
        return self._table["row"][i].as_py()

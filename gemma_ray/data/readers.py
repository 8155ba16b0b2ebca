"""Records of one cut of a source file, each with its number in the cut; what cannot be read is a fault with a number too."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gemma_ray.data.files import Cut, SourceFile, first_line, is_arrow_stream, open_input
from gemma_ray.errors import DataError

UTF8_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
BATCH_ROWS = 256
READ_BYTES = 4 << 20
"""Asked for at once: over a network every request is a round trip."""


@dataclass(frozen=True)
class Entry:
    """A record, or why there is none; neither for an empty line. `number` counts lines or rows of the cut from 1."""

    number: int
    record: dict[str, Any] | None
    fault: str = ""

    @property
    def is_blank(self) -> bool:
        """Whether it is an empty line."""
        return self.record is None and not self.fault


def read_cut(cut: Cut) -> Iterator[Entry]:
    """The entries of a cut in order. A line belongs to the cut that it begins in.

    Raises DataError, naming the file, for one that is no data at all.
    """
    yield from _lines(cut) if cut.file.kind == "lines" else _rows(cut)


def _lines(cut: Cut) -> Iterator[Entry]:
    for number, line in enumerate(_raw_lines(cut), 1):
        if cut.start == 0 and number == 1:
            line = _without_mark(line, cut.file)
        yield _parsed(number, line) if line.strip() else Entry(number, None)


def _raw_lines(cut: Cut) -> Iterator[bytes]:
    file = cut.file
    try:
        with open_input(file.path, file.compression) as opened, io.BufferedReader(opened, READ_BYTES) as stream:
            if file.compression:
                yield from stream
                return
            if cut.start:
                stream.seek(cut.start - 1)
                stream.readline()  # the rest of a line that began in the cut before
            while stream.tell() < cut.end and (line := stream.readline()):
                yield line
    except OSError as e:
        raise DataError(f"{file.path}: cannot be read ({first_line(e)})") from e


def _without_mark(line: bytes, file: SourceFile) -> bytes:
    """A file's first line without a byte order mark. Raises DataError when it is of another encoding, or binary."""
    if line.startswith(UTF16_MARKS):
        raise DataError(f"{file.path}: UTF-16 text; write it as UTF-8")
    if b"\0" in line:
        raise DataError(f"{file.path}: a binary file, not lines of JSON")
    line = line.removeprefix(UTF8_MARK)
    if line.strip() == b"[":
        raise DataError(f"{file.path}: one JSON list; write each of its records as a line of its own")
    return line


def _parsed(number: int, line: bytes) -> Entry:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as e:  # also bytes that are not UTF-8, and integers of thousands of digits
        return Entry(number, None, f"not a line of JSON ({str(e).partition(';')[0]})")
    if not isinstance(record, dict):
        return Entry(number, None, f"a record is an object, not {JSON_NAMES[type(record)]}")
    return Entry(number, record)


def _rows(cut: Cut) -> Iterator[Entry]:
    import pyarrow as pa

    number = 0
    try:
        for batch in _batches(cut):
            for start in range(0, batch.num_rows, BATCH_ROWS):
                for entry in _entries(batch.slice(start, BATCH_ROWS), number + 1):
                    number = entry.number
                    yield entry
    except (OSError, pa.ArrowException) as e:
        raise DataError(f"{cut.file.path}: cannot be read as {cut.file.kind} ({first_line(e)}); fetch it again") from e


def _entries(batch: Any, first: int) -> list[Entry]:
    """The rows of a batch, numbered from `first`. What Arrow holds and Python cannot (text that is not UTF-8, a date of the year 9,000,000)
    is a fault of its row alone."""
    try:
        return [Entry(first + i, record) for i, record in enumerate(batch.to_pylist())]
    except (ValueError, OverflowError) as e:
        if batch.num_rows == 1:
            return [Entry(first, None, f"holds what cannot be read ({first_line(e)})")]
        return [entry for i in range(batch.num_rows) for entry in _entries(batch.slice(i, 1), first + i)]


def _batches(cut: Cut) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_input(cut.file.path) as opened:
        if cut.file.kind == "parquet":
            yield from pq.ParquetFile(opened, pre_buffer=True).iter_batches(BATCH_ROWS, row_groups=list(range(cut.start, cut.end)))
        elif is_arrow_stream(opened):
            yield from pa.ipc.open_stream(opened)
        else:
            reader = pa.ipc.open_file(opened)
            for i in range(cut.start, cut.end):
                yield reader.get_batch(i)


JSON_NAMES = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "text",
    bytes: "bytes",
    list: "a list",
    dict: "an object",
}
"""What values are called in messages."""

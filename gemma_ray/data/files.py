"""Source files: which there are, of what kind, and how they are cut into chunks that workers read by themselves.

    kind      names                               a cut is
    lines     .jsonl .ndjson .json, also .gz      a range of bytes; whole files when compressed
              .bz2 .zst
    parquet   .parquet                            a range of row groups
    arrow     .arrow .feather (file or stream)    a range of record batches; whole files when a stream

A single file of another name is recognised by its first bytes. Places may be local or any that pyarrow has a file system for, such as
`gs://bucket/folder`.
"""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma_ray.artifacts import file_sha256, fingerprint
from gemma_ray.errors import DataError

SUFFIXES = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
CHUNK_BYTES = 8 << 20
"""About so much of the source is read by one task, more where there would be too many tasks."""
MOST_CHUNKS = 1000
RETRY_S = 60
"""How long Cloud Storage is asked again before it counts as unreachable; the client's own 15 minutes look like a hang."""


@dataclass(frozen=True)
class SourceFile:
    """A file with records."""

    path: str
    """A local path, or a URI."""
    kind: str
    size: int
    fingerprint: str
    """Of its bytes where it is local, of size and time of change where it is not."""

    @property
    def compression(self) -> str | None:
        """How it is compressed as a whole."""
        return COMPRESSIONS.get(_suffixes(self.path)[1])


@dataclass(frozen=True)
class Cut:
    """Part of a file: bytes of lines, row groups or record batches [start, end)."""

    file: SourceFile
    start: int
    end: int


def source_files(source: str) -> list[SourceFile]:
    """The files that a path, a folder (searched to any depth) or a glob names, sorted.

    Raises DataError when there are none or the place cannot be read. Names that begin with `.` or `_` are left out of folders.
    """
    try:
        found = _remote(source) if "://" in source else _local(source)
        files = [_described(path, size, stamp) for path, size, stamp in found]
    except (OSError, ValueError, NotImplementedError) as e:
        raise DataError(f"data.source = '{source}': cannot be read ({first_line(e)})") from e
    for file in files:
        if not _is_text(file.path):
            raise DataError(f"{file.path!a}: a file's name that is not UTF-8; rename the file")
    if not files:
        raise DataError(f"data.source = '{source}': no such file, and no {' '.join('*' + suffix for suffix in SUFFIXES)} files there")
    return files


def open_input(path: str, compression: str | None = None) -> Any:
    """A pyarrow input stream of a file's bytes, decompressed; a random access file when nothing is compressed."""
    import pyarrow as pa

    system, name = _filesystem(path)
    return pa.CompressedInputStream(system.open_input_file(name), compression) if compression else system.open_input_file(name)


def chunks(files: Sequence[SourceFile], chunk_bytes: int = CHUNK_BYTES) -> list[tuple[Cut, ...]]:
    """The files in order as groups of cuts of about `chunk_bytes`, about `MOST_CHUNKS` at most; a function of the files alone.

    Raises DataError for a Parquet or Arrow file that cannot be read.
    """
    chunk_bytes = max(chunk_bytes, sum(file.size for file in files) // MOST_CHUNKS)
    groups: list[list[Cut]] = [[]]
    filled = 0
    for file in files:
        for cut, size in _cuts(file, chunk_bytes):
            if filled and filled + size > chunk_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(cut)
            filled += size
    return [tuple(group) for group in groups if group]


def _cuts(file: SourceFile, chunk_bytes: int) -> Iterator[tuple[Cut, int]]:
    if file.kind == "lines":
        step = file.size if file.compression else chunk_bytes
        for start in range(0, file.size, max(step, 1)):
            end = min(start + step, file.size)
            yield Cut(file, start, end), end - start
        return
    for start, size in enumerate(_part_sizes(file)):
        yield Cut(file, start, start + 1), size


def _part_sizes(file: SourceFile) -> list[int]:
    """Bytes of the row groups or record batches of a file; a stream is one part."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_input(file.path) as opened:
            if file.kind == "parquet":
                metadata = pq.ParquetFile(opened).metadata
                return [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
            if is_arrow_stream(opened):
                return [file.size]
            count = pa.ipc.open_file(opened).num_record_batches
            return [file.size // count] * count if count else []
    except (OSError, pa.ArrowException) as e:
        raise DataError(f"{file.path}: not a {file.kind} file ({first_line(e)}); fetch it again") from e


def is_arrow_stream(opened: Any) -> bool:
    """Whether an Arrow file is of the streaming format, as Hugging Face's datasets writes. Leaves the file at its start."""
    magic = opened.read(6)
    opened.seek(0)
    return magic != b"ARROW1"


def files_fingerprint(files: Sequence[SourceFile]) -> str:
    """Changes when a file's name or content does; not with the folder that they are in."""
    return fingerprint([(_address(file.path)[1].rsplit("/", 1)[-1], file.fingerprint) for file in files])


def _local(source: str) -> list[tuple[str, int, Any]]:
    path = Path(source).expanduser()
    if path.is_file():
        named = [path]
    elif path.is_dir():
        named = [file for file in path.rglob("*") if _is_data(file.relative_to(path).as_posix())]
    else:
        named = [Path(name) for name in glob.glob(str(path), recursive=True)]  # noqa: PTH207 - an absolute pattern
    return [(str(file), file.stat().st_size, None) for file in sorted(named) if file.is_file()]


def _remote(source: str) -> list[tuple[str, int, Any]]:
    from pyarrow import fs

    start, name, query = _address(source)
    wildcard = re.search(r"[*?\[]", name)
    system, fixed = _filesystem(start + (name[: wildcard.start()].rpartition("/")[0] if wildcard else name) + query)
    info = system.get_file_info(fixed)
    if info.type == fs.FileType.File:
        return [(source, info.size, info.mtime_ns)]
    inside = system.get_file_info(fs.FileSelector(fixed, recursive=True, allow_not_found=True))
    return [
        (start + entry.path + query, entry.size, entry.mtime_ns)
        for entry in sorted(inside, key=lambda entry: entry.path)
        if entry.type == fs.FileType.File
        and (fnmatch.fnmatch(entry.path, name) if wildcard else _is_data(entry.path.removeprefix(fixed).lstrip("/")))
    ]


def _address(place: str) -> tuple[str, str, str]:
    """The parts of `scheme://user@name?key=value`: up to the name, the name, and the rest."""
    found = re.fullmatch(r"(\w+://(?:[^/@]*@)?)(.*?)(\?\w+=.*)?", place, re.DOTALL)
    return (found[1], found[2], found[3] or "") if found else ("", place, "")


def _filesystem(path: str) -> tuple[Any, str]:
    from pyarrow import fs

    if "://" not in path:
        return fs.LocalFileSystem(), str(Path(path).absolute())
    if path.startswith(("gs://", "gcs://")) and "retry_limit_seconds=" not in path:
        path += f"{'&' if _address(path)[2] else '?'}retry_limit_seconds={RETRY_S}"
    return fs.FileSystem.from_uri(path)


def _is_data(name: str) -> bool:
    """Whether a file inside a folder is taken for data."""
    return not any(part.startswith((".", "_")) for part in name.split("/")) and _suffixes(name)[0] in SUFFIXES


def _suffixes(path: str) -> tuple[str, str]:
    """What a file's name says of its kind, and of its compression; empty where it says nothing."""
    name = Path(_address(path)[1])
    return (Path(name.stem).suffix, name.suffix) if name.suffix in COMPRESSIONS else (name.suffix, "")


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _described(path: str, size: int, stamp: Any) -> SourceFile:
    kind = SUFFIXES.get(_suffixes(path)[0]) or _kind_by_content(path)
    return SourceFile(path, kind, size, file_sha256(Path(path)) if stamp is None else fingerprint([size, stamp]))


def _kind_by_content(path: str) -> str:
    with open_input(path) as opened:
        first = opened.read(6)
    return "parquet" if first.startswith(b"PAR1") else "arrow" if first == b"ARROW1" else "lines"


def first_line(error: Exception) -> str:
    """What an error says, in a line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]

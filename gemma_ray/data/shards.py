"""ArrayRecord shards and the manifest that lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from gemma_ray.artifacts import file_sha256, fingerprint, write_json
from gemma_ray.errors import DataError

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Shard:
    """One file of rows."""

    file: str
    rows: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a data folder holds and what it was made from. `padding_fraction` is that of rows padded to `seq_len`."""

    rows_read: int
    rows_kept: int
    rows_dropped: dict[str, int]
    tokens: int
    loss_tokens: int
    padding_fraction: float
    seq_len: int
    tokenizer: str
    source: str
    template: str
    probe: str
    shards: list[Shard] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write manifest.json."""
        write_json(folder / MANIFEST, asdict(self))

    def fingerprint(self) -> str:
        """Changes when a row, a token or a mask bit changes."""
        return fingerprint([asdict(shard) for shard in self.shards])


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a data folder. Raises DataError when it is missing or not one."""
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(f"{path}: no prepared data; run `gemma-ray data prepare` first")
    try:
        return TypeAdapter(Manifest).validate_json(path.read_bytes(), strict=True)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"{path}: not a manifest ({where or 'the file'}: {first['msg']}); {_remedy(folder)}") from e


def _remedy(folder: Path) -> str:
    return f"remove {folder} and run `gemma-ray data prepare`"


def write_shard(path: Path, records: Sequence[bytes]) -> None:
    """Write records to an ArrayRecord file that can be read at random."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def number_shards(folder: Path, rows_by_file: dict[str, int]) -> list[Shard]:
    """Rename shard files, in their given order, to `shard-IIIII-of-NNNNN.array_record`, and describe them."""
    shards = []
    for i, (name, rows) in enumerate(rows_by_file.items()):
        final = folder / f"shard-{i:05d}-of-{len(rows_by_file):05d}.array_record"
        (folder / name).rename(final)
        shards.append(Shard(final.name, rows, file_sha256(final)))
    return shards


def check_shards(folder: Path, manifest: Manifest) -> None:
    """Raise DataError naming a shard that is missing or has other bytes than the manifest says."""
    for shard in manifest.shards:
        path = folder / shard.file
        if not path.is_file():
            raise DataError(f"{path}: listed in {MANIFEST} but missing; {_remedy(folder)}")
        if file_sha256(path) != shard.sha256:
            raise DataError(f"{path}: its bytes are not those that {MANIFEST} lists; {_remedy(folder)}")

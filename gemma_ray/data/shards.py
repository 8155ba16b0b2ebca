"""ArrayRecord shards and the manifest that lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from gemma_ray.artifacts import file_sha256, fingerprint, replaced, write_json
from gemma_ray.errors import DataError

MANIFEST = "manifest.json"
DROPPED = "dropped.jsonl"


@dataclass(frozen=True)
class Shard:
    """One file of rows. `examples` are in its rows, several in one where they are packed."""

    file: str
    rows: int
    sha256: str
    examples: int
    tokens: int
    loss_tokens: int
    lengths: dict[int, int]
    """Rows by what they are padded to, which is their order in the file."""


@dataclass(frozen=True)
class Manifest:
    """What a data folder holds and what it was made from. `rows_read` and `rows_kept` count examples, `sequences` what training reads."""

    rows_read: int
    rows_kept: int
    rows_dropped: dict[str, int]
    tokens: int
    loss_tokens: int
    padding_fraction: float
    """Share of padding in sequences as they are trained on."""
    seq_len: int
    layout: str
    sequences: int
    example_lengths: dict[int, int]
    """Examples by tokens, rounded up to a 32nd of `seq_len`."""
    tokenizer: str
    source: str
    schemas: dict[str, int]
    """Records by the schema that read them."""
    decontaminated: dict[str, str]
    """Benchmarks that were kept out, with their fingerprints."""
    template: str
    probes: list[str]
    """Probe conversations as they are rendered, which the served model's template has to render alike."""
    rows_truncated: int = 0
    """Of those that are kept, longer ones that were cut to fit."""
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


def write_shard(path: Path, records: Sequence[bytes]) -> str:
    """Write records to an ArrayRecord file that can be read at random, whole or not at all; its SHA-256."""
    from array_record.python.array_record_module import ArrayRecordWriter

    with replaced(path) as temporary:
        writer = ArrayRecordWriter(str(temporary), "group_size:1")
        for record in records:
            writer.write(record)
        writer.close()
        return file_sha256(temporary)


def shard_name(number: int, of: int) -> str:
    """The file of a shard."""
    return f"shard-{number:05d}-of-{of:05d}.array_record"


def check_shards(folder: Path, manifest: Manifest) -> None:
    """Raise DataError naming a shard that is missing or has other bytes than the manifest says."""
    for shard in manifest.shards:
        path = folder / shard.file
        if not path.is_file():
            raise DataError(f"{path}: listed in {MANIFEST} but missing; {_remedy(folder)}")
        if file_sha256(path) != shard.sha256:
            raise DataError(f"{path}: its bytes are not those that {MANIFEST} lists; {_remedy(folder)}")

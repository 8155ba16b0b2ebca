"""A small prepared data folder for both engines: packed rows of several documents, of which parts bear loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gemma_ray.data.records import pack_row
from gemma_ray.data.shards import Manifest, Shard, shard_name, write_shard
from gemma_ray.models.templates import Tokens

LENGTH = 48


def documents(lengths: list[int], rng: np.random.Generator) -> list[Tokens]:
    """Documents of random tokens; a random share of each one's end bears loss, of some none."""
    found = []
    for length in lengths:
        loss = np.zeros(length, bool)
        loss[rng.integers(0, length + 1) :] = True
        found.append(Tokens(rng.integers(5, 1000, length).astype(np.int32), loss))
    return found


def write_rows(folder: Path, rows: int = 40, seed: int = 0) -> Path:
    """A data folder of one shard of `rows` packed rows of up to LENGTH tokens."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [rng.integers(3, LENGTH // 3, rng.integers(1, 4)).tolist() for _ in range(rows)]
    name = shard_name(0, 1)
    sha256 = write_shard(folder / name, [pack_row(documents(each, rng)) for each in lengths])
    tokens = sum(map(sum, lengths))
    shard = Shard(name, rows, sha256, sum(map(len, lengths)), tokens, tokens // 2, {LENGTH: rows})
    manifest = Manifest(
        rows_read=shard.examples,
        rows_kept=shard.examples,
        rows_dropped={},
        tokens=tokens,
        loss_tokens=tokens // 2,
        padding_fraction=0.0,
        seq_len=LENGTH,
        layout="packed",
        sequences=rows,
        example_lengths={},
        tokenizer="",
        source="random",
        schemas={},
        decontaminated={},
        template="",
        probes=[],
        shards=[shard],
    )
    manifest.write(folder)
    return folder

"""Prepared data as one self-contained HTML page: what was kept and left out, how long examples are, and rows token by token."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gemma_ray.artifacts import write_text
from gemma_ray.data.shards import DROPPED, Manifest, read_manifest
from gemma_ray.data.show import ShownToken, own_tokenizer, rows, shown
from gemma_ray.reporting.page import render_page

HERE = Path(__file__).parent


@dataclass(frozen=True)
class ShownRow:
    """A row's examples, and how many tokens it has and how many of them bear loss."""

    examples: list[list[ShownToken]]
    tokens: int
    loss: int


def write_page(folder: Path, model: Path, count: int, out: Path) -> Path:
    """Write the page over a data folder with its first `count` rows to `out`, and return that.

    Raises DataError when the folder is not prepared data or was made with another tokenizer, OSError when `out` cannot be written.
    """
    manifest = read_manifest(folder)
    tokenizer = own_tokenizer(folder, model)
    found = [
        ShownRow([shown(tokenizer, document) for document in row.documents()], len(row.tokens), int(row.loss.sum()))
        for row in itertools.islice(rows(folder), count)
    ]
    page = render_page(
        HERE,
        folder=folder,
        facts=_facts(manifest),
        dropped=list(_dropped(folder, manifest)),
        histogram=_histogram(manifest),
        rows=found,
    )
    write_text(out, page)
    return out


def _facts(manifest: Manifest) -> list[tuple[str, str]]:
    share = manifest.loss_tokens / manifest.tokens
    return [
        ("read", f"{manifest.rows_read:,} records: {', '.join(f'{name} {count:,}' for name, count in manifest.schemas.items())}"),
        ("kept", f"{manifest.rows_kept:,} examples in {manifest.sequences:,} rows of {manifest.seq_len:,} tokens ({manifest.layout})"),
        ("cut to fit", f"{manifest.rows_truncated:,} examples"),
        ("tokens", f"{manifest.tokens:,}, of which {manifest.loss_tokens:,} ({share:.1%}) bear loss"),
        ("padding", f"{manifest.padding_fraction:.1%} of all positions"),
        ("template", manifest.template),
        ("kept out", ", ".join(manifest.decontaminated) or "no benchmark"),
    ]


def _dropped(folder: Path, manifest: Manifest) -> Iterator[tuple[str, int, str]]:
    """Reasons, how often, and where the first of each stands."""
    first: dict[str, str] = {}
    if (folder / DROPPED).is_file():
        with (folder / DROPPED).open(encoding="utf-8") as lines:
            for line in lines:
                found = json.loads(line)
                first.setdefault(found["reason"], " — ".join(filter(None, (found["where"], found["detail"]))))
    for reason, count in manifest.rows_dropped.items():
        yield reason, count, first.get(reason, "")


def _histogram(manifest: Manifest) -> list[tuple[str, int, float]]:
    """Bars: tokens up to, examples, and width in per cent of the widest."""
    most = max(manifest.example_lengths.values(), default=1)
    return [(f"≤ {length:,}", count, round(100 * count / most, 1)) for length, count in manifest.example_lengths.items()]

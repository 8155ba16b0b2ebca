"""Source files to shards, in three passes, two of them on Ray Data:

    files ─ cut ─► chunks ── read, clean, template, tokenise, mask ──► chunk-*.arrow     one task a chunk
                   numbers of all chunks ── duplicates ──► which examples stay           here
                   examples of a shard ── pack ──► shard-*.array_record                  one task a shard
                   ──► manifest.json

Every chunk and every shard is a file that is a function of its input alone and appears whole. So the result is the same on any number of
workers, and a run that was killed continues: what is finished lies in a folder beside the result, which is named after everything that the
result follows from.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gemma_ray.artifacts import file_sha256, fingerprint, put_in_place, replaced, whole_folder
from gemma_ray.data.chunks import Chunk, ChunkJob, chunk_name
from gemma_ray.data.config import DataConfig
from gemma_ray.data.contamination import benchmark
from gemma_ray.data.files import Cut, SourceFile, chunks, files_fingerprint
from gemma_ray.data.passes import in_parallel, start_workers
from gemma_ray.data.records import pack_row
from gemma_ray.data.selection import Selection, select, shards
from gemma_ray.data.sharding import RESULT, ShardJob, example_lengths, shard_of
from gemma_ray.data.shards import DROPPED, Manifest, Shard, shard_name, write_shard
from gemma_ray.data.tokenizing import Tokenizing
from gemma_ray.errors import DataError
from gemma_ray.models.gemma4 import read_text_config
from gemma_ray.models.template_check import chat_format, probe_texts
from gemma_ray.models.templates import Tokens
from gemma_ray.models.tokenizer import Tokenizer

SHOWN_FAULTS = 3
PACKAGE = Path(__file__).resolve().parent


def prepare(
    config: DataConfig,
    files: Sequence[SourceFile],
    model: Path,
    out: Path,
    benchmarks: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Read, clean, template, tokenise, mask, pack and shard `files` for the model in folder `model`; write `out` whole.

    `files` are the `source_files` of `config.source`, a built-in set already made into files; `benchmarks` are kept out beside
    `config.decontaminate`. Needs a Ray connection. Raises DataError for files that are empty or unreadable (naming file and line), or of
    which no example is left; ModelError when the tokenizer does not fit; OSError when the disk is full, and continues when called again.
    """
    start_workers()
    chat = chat_format(model, read_text_config(model)["model_type"])
    tokenizer = Tokenizer(model)
    kept_out = tuple(benchmark(name) for name in dict.fromkeys((*config.decontaminate, *benchmarks)))
    made_from = fingerprint(
        [
            config.model_dump(mode="json", exclude={"source"}),
            files_fingerprint(files),
            tokenizer.fingerprint(),
            dataclasses.asdict(chat),
            [found.fingerprint() for found in kept_out],
            _source_fingerprint(),
        ]
    )
    work = _work_folder(out, made_from)
    tokenizing = Tokenizing(config, model, tokenizer.fingerprint(), chat)
    try:
        cuts = chunks(files)
        in_parallel("chunk", ChunkJob(config, tokenizing, kept_out, work), cuts, [work / chunk_name(i) for i in range(len(cuts))], progress)
        made = {
            "tokenizer": tokenizer.fingerprint(),
            "source": files_fingerprint(files),
            "template": f"{chat.name}; reasoning: {config.reasoning}; loss: {config.loss}",
            "probes": probe_texts(chat),
            "decontaminated": {found.name: found.fingerprint() for found in kept_out},
        }
        manifest = _finish(config, cuts, work, made, progress)
    except DataError:  # the same again next time
        shutil.rmtree(work, ignore_errors=True)
        raise
    manifest.write(work / RESULT)
    put_in_place(work / RESULT, out)
    shutil.rmtree(work, ignore_errors=True)
    return manifest


def prepare_text(texts: Iterable[str], tokenizer_folder: Path, seq_len: int, out: Path) -> Manifest:
    """Raw text to shards for full-parameter training: documents end in `<eos>`, are laid end to end and cut into rows.

    Every token bears loss; the rest that fills no row is left out. Raises DataError when the texts do not fill one row.
    """
    tokenizer = Tokenizer(tokenizer_folder)
    bos, eos = tokenizer.marker_id("<bos>"), tokenizer.marker_id("<eos>")
    stream: list[int] = []
    documents = 0
    for text in texts:
        stream += [*tokenizer.encode(text).ids, eos]
        documents += 1
    rows = [[bos, *stream[i : i + seq_len - 1]] for i in range(0, len(stream) - seq_len + 2, seq_len - 1)]
    if not rows:
        raise DataError(f"{documents} texts of {len(stream)} tokens in all do not fill one row of {seq_len}")
    count, tokens = len(rows), len(rows) * seq_len
    with whole_folder(out) as folder:
        packed = [pack_row([Tokens(np.array(row, np.int32), np.ones(len(row), bool))]) for row in rows]
        sha256 = write_shard(folder / shard_name(0, 1), packed)
        shard = Shard(shard_name(0, 1), count, sha256, documents, tokens, tokens, {seq_len: count})
        manifest = _manifest(
            [shard],
            DataConfig(max_seq_len=seq_len, layout="padded"),
            rows_read=documents,
            rows_dropped={},
            example_lengths={},
            schemas={},
            tokenizer=tokenizer.fingerprint(),
            source=fingerprint(stream),
            template="raw text; loss: every token",
            probes=[],
            decontaminated={},
        )
        manifest.write(folder)
    return manifest


def _work_folder(out: Path, made_from: str) -> Path:
    """Where finished chunks and shards wait; those of another source or recipe are removed."""
    work = out.with_name(f".{out.name}.{made_from}.work")
    for other in out.parent.glob(f".{out.name}.*.work") if out.parent.is_dir() else ():
        if other != work:
            shutil.rmtree(other, ignore_errors=True)
    (work / RESULT).mkdir(parents=True, exist_ok=True)
    return work


def _finish(
    config: DataConfig, cuts: list[tuple[Cut, ...]], work: Path, made_with: dict[str, Any], progress: Callable[[str], None]
) -> Manifest:
    """The second and the third pass over finished chunks; `made_with` are the manifest's fields that say what they were made with."""
    found = [Chunk(work / chunk_name(i)) for i in range(len(cuts))]
    places = _Places(cuts, found)
    read = sum(map(len, found))
    reasons: Counter[str] = Counter()
    for chunk in found:
        reasons.update(reason for reason in chunk.texts("reason") if reason)
    _refuse(config, found, places, reasons, read)
    chosen = select(found, config.near_duplicates)
    reasons.update({"duplicate": len(chosen.duplicates), "near_duplicate": len(chosen.near)})
    if not len(chosen.chunk):
        length = f"; data.max_seq_len is {config.max_seq_len}" if reasons["too_long"] else ""
        raise DataError(f"all {read} rows were dropped ({_counted(reasons)}), the first {places.first_dropped()}{length}")
    _list_dropped(work / RESULT / DROPPED, found, places, chosen)
    parts = list(shards(chosen, config.rows_per_shard))
    described = [work / f"{shard_name(i, len(parts))}.json" for i in range(len(parts))]
    in_parallel("shard", ShardJob(config, work, len(parts)), parts, described, progress)
    made = [shard_of(path) for path in described]
    schemas: Counter[str] = Counter()
    for chunk in found:
        schemas.update(chunk.schemas)
    return _manifest(
        made,
        config,
        rows_read=read,
        rows_dropped=dict(sorted((reason, n) for reason, n in reasons.items() if n)),
        rows_truncated=int(chosen.numbers(found, "truncated").sum()),
        example_lengths=example_lengths(found, chosen, config.max_seq_len),
        schemas=dict(schemas),
        **made_with,
    )


def _refuse(config: DataConfig, found: list[Chunk], places: _Places, reasons: Counter[str], read: int) -> None:
    """Raise DataError when more cannot be read, or is too long, than the recipe allows."""
    if not read:
        paths = sorted({str(cut.file.path) for cuts in places.cuts for cut in cuts})
        read_in = f" ({len(paths)} files, {paths[0]} the first)" if paths else ""
        raise DataError(f"data.source = '{config.source}': not one record in it{read_in}")
    limits = {"malformed": config.bad_lines, **({"too_long": 0} if config.too_long == "refuse" else {})}
    for reason, most in limits.items():
        if reasons[reason] > most:
            shown = places.dropped(reason, SHOWN_FAULTS)
            more = f" and {reasons[reason] - len(shown)} more" if reasons[reason] > len(shown) else ""
            key = "data.bad_lines" if reason == "malformed" else "data.too_long"
            raise DataError(f"{'; '.join(shown)}{more} ({reasons[reason]} of {read} records; {key}={getattr(config, key[5:])})")


class _Places:
    """Where the entries of chunks stand: file and line."""

    def __init__(self, cuts: list[tuple[Cut, ...]], found: list[Chunk]):
        self.cuts, self.found = cuts, found
        self.before: dict[tuple[int, int], int] = {}
        so_far: Counter[str] = Counter()
        for i, (group, chunk) in enumerate(zip(cuts, found, strict=True)):
            for j, cut in enumerate(group):
                self.before[i, j] = so_far[cut.file.path]
                so_far[cut.file.path] += chunk.lines[j]

    def of(self, chunk: int, row: int) -> str:
        """File and line of a row of a chunk."""
        cut, number = int(self.found[chunk].numbers("cut")[row]), int(self.found[chunk].numbers("number")[row])
        return f"{self.cuts[chunk][cut].file.path}:{self.before[chunk, cut] + number}"

    def dropped(self, reason: str | None, most: int) -> list[str]:
        """The first rows that were dropped for a reason, or for any."""
        shown = []
        for i, chunk in enumerate(self.found):
            for row, why in enumerate(chunk.texts("reason")):
                if why and (reason is None or why == reason):
                    detail = chunk.texts("detail")[row]
                    shown.append(f"{self.of(i, row)}: {detail or why}")
                    if len(shown) == most:
                        return shown
        return shown

    def first_dropped(self) -> str:
        """The first row that was dropped, with why."""
        return next(iter(self.dropped(None, 1)), "")


def _list_dropped(path: Path, found: list[Chunk], places: _Places, chosen: Selection) -> None:
    """A line for every example that was left out: where it stands, why, and what there is to say about it."""
    with replaced(path) as temporary, temporary.open("w", encoding="utf-8") as out:
        for i, chunk in enumerate(found):
            details = chunk.texts("detail")
            for row, reason in enumerate(chunk.texts("reason")):
                if reason:
                    out.write(json.dumps({"where": places.of(i, row), "reason": reason, "detail": details[row]}) + "\n")
        for reason, pairs in (("duplicate", chosen.duplicates), ("near_duplicate", chosen.near)):
            for chunk, row, original in pairs.tolist():
                first = places.of(*chosen.clean[original].tolist())
                out.write(json.dumps({"where": places.of(chunk, row), "reason": reason, "detail": f"like {first}"}) + "\n")


def _counted(reasons: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()) if count)


def _manifest(made: list[Shard], config: DataConfig, **fields: Any) -> Manifest:
    """The manifest of shards; `fields` are those that do not follow from them."""
    tokens, places = sum(shard.tokens for shard in made), sum(n * length for shard in made for length, n in shard.lengths.items())
    return Manifest(
        rows_kept=sum(shard.examples for shard in made),
        tokens=tokens,
        loss_tokens=sum(shard.loss_tokens for shard in made),
        padding_fraction=1 - tokens / places if places else 0.0,
        seq_len=config.max_seq_len,
        layout=config.layout,
        sequences=sum(shard.rows for shard in made),
        shards=made,
        **fields,
    )


def _source_fingerprint() -> str:
    """Of the code that makes chunks and shards."""
    names = ("*.py", "*.npz")
    files = [file for name in names for file in sorted(PACKAGE.glob(name))] + [PACKAGE.parent / "models" / "templates.py"]
    return fingerprint({file.name: file_sha256(file) for file in files})

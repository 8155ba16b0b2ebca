"""Source files to shards, on Ray Data:

    files ── read ──► records ── clean, template, tokenise, mask ──► rows ── write ──► shard-*.array_record + manifest.json

Every step is a function of its input alone and order is kept, so the same source gives the same bytes on any number of hosts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gemma_ray.artifacts import file_sha256, fingerprint, whole_folder
from gemma_ray.data.config import DataConfig
from gemma_ray.data.readers import Parsed, parse_codev, read_records, source_files
from gemma_ray.data.records import pack_row
from gemma_ray.data.shards import Manifest, number_shards, write_shard
from gemma_ray.errors import DataError
from gemma_ray.models.gemma4 import read_text_config
from gemma_ray.models.templates import ChatFormat, Conversation, chat_format, render, tokenize
from gemma_ray.models.tokenizer import Tokenizer

PROBE = Conversation("probe", "answer", reasoning="reasoning", system="system")


def prepare(config: DataConfig, source: str, model: Path, out: Path) -> Manifest:
    """Read, clean, template, tokenise, mask and shard `source` for the model in folder `model`; write `out` whole.

    `source` is `config.source` with a built-in set already made into files. Needs a Ray connection. Raises DataError for a source that is
    missing, empty or malformed (naming file and line), or of which no row is left; ModelError when the tokenizer does not fit.
    """
    files = source_files(source)
    chat = chat_format(model, read_text_config(model)["model_type"])
    tokenizer = Tokenizer(model)
    with whole_folder(out) as folder:
        parts = _run(files, _Tokenize(config, model, chat), folder, config.rows_per_shard)
        manifest = _manifest(parts, config, folder, tokenizer, render(chat, PROBE).text, source=_source_fingerprint(files))
        if manifest.rows_read == 0:
            raise DataError(f"data.source = '{source}': {len(files)} files and not one record in them")
        if manifest.rows_kept == 0:
            reasons = ", ".join(f"{reason} {count}" for reason, count in manifest.rows_dropped.items())
            raise DataError(
                f"data.source = '{source}': all {manifest.rows_read} rows were dropped ({reasons}); "
                f"data.max_seq_len is {config.max_seq_len}"
            )
        manifest.write(folder)
    return manifest


def prepare_text(texts: Iterable[str], tokenizer_folder: Path, seq_len: int, out: Path) -> Manifest:
    """Raw text to shards for full-parameter training: documents end in `<eos>`, are laid end to end and cut into rows.

    Every token bears loss; the rest that fills no row is left out. Raises DataError when the texts do not fill one row.
    """
    tokenizer = Tokenizer(tokenizer_folder)
    bos, eos = tokenizer.special_id("<bos>"), tokenizer.special_id("<eos>")
    assert bos is not None and eos is not None
    stream: list[int] = []
    documents = 0
    for text in texts:
        stream += [*tokenizer.encode(text).ids, eos]
        documents += 1
    rows = [[bos, *stream[i : i + seq_len - 1]] for i in range(0, len(stream) - seq_len + 2, seq_len - 1)]
    if not rows:
        raise DataError(f"{documents} texts of {len(stream)} tokens in all do not fill one row of {seq_len}")
    with whole_folder(out) as folder:
        write_shard(folder / "part-0", [pack_row(row, [True] * len(row)) for row in rows])
        part = _Part(0, "part-0", len(rows), documents, {}, len(rows) * seq_len, len(rows) * seq_len, None)
        manifest = _manifest([part], DataConfig(max_seq_len=seq_len), folder, tokenizer, "", source=fingerprint(stream))
        manifest.write(folder)
    return manifest


@dataclass(frozen=True)
class _Part:
    """What one writing task made: its place in the order, its file (none when every row was dropped), and its counts."""

    order: int
    file: str | None
    rows: int
    rows_read: int
    dropped: dict[str, int]
    tokens: int
    loss_tokens: int
    fault: str | None


def _run(files: list[Path], tokenize_rows: _Tokenize, folder: Path, rows_per_shard: int) -> list[_Part]:
    import ray
    from ray.data import DataContext

    context = DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    rows = (
        ray.data.from_items([{"index": i, "file": str(file)} for i, file in enumerate(files)])
        .flat_map(_read_file)
        .map(tokenize_rows)
        .map_batches(_Write(folder), batch_size=rows_per_shard, batch_format="pyarrow")
    )
    parts = sorted((_Part(**json.loads(row["part"])) for row in rows.take_all()), key=lambda part: part.order)
    fault = next((part.fault for part in parts if part.fault), None)
    if fault:
        raise DataError(fault)
    return parts


def _read_file(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A file's conversations as rows; a line that cannot be read becomes a row with a fault, which ends the file."""
    path = Path(item["file"])
    order = item["index"] << 32
    try:
        for number, record in read_records(path):
            yield {"order": order + number, "parsed": json.dumps(asdict(parse_codev(record, f"{path}:{number}"))), "fault": ""}
    except DataError as e:
        yield {"order": order, "parsed": "", "fault": str(e)}


class _Tokenize:
    """Conversation → packed row, or the reason it was dropped."""

    def __init__(self, config: DataConfig, model: Path, chat: ChatFormat):
        self.config, self.model, self.chat = config, model, chat
        self.tokenizer: Tokenizer | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tokenizer": None}

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        result = {"order": row["order"], "row": b"", "tokens": 0, "loss_tokens": 0, "dropped": "", "fault": row["fault"]}
        if row["fault"]:
            return result
        parsed = Parsed(**json.loads(row["parsed"]))
        if parsed.dropped:
            return {**result, "dropped": parsed.dropped}
        reasoning = parsed.reasoning if self.config.reasoning == "context" else None
        conversation = Conversation(parsed.prompt, parsed.answer, reasoning, self.config.system_prompt)
        self.tokenizer = self.tokenizer or Tokenizer(self.model)
        tokens, mask = tokenize(self.tokenizer, render(self.chat, conversation))
        if len(tokens) > self.config.max_seq_len:
            return {**result, "dropped": "too_long"}
        return {**result, "row": pack_row(tokens, mask), "tokens": len(tokens), "loss_tokens": sum(mask)}


class _Write:
    """A batch of rows → one shard file, named by its first row until the whole order is known."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self, batch: Any) -> dict[str, list[str]]:
        rows = sorted(batch.to_pylist(), key=lambda row: row["order"])
        kept = [row for row in rows if row["row"]]
        file = f"part-{rows[0]['order']:020d}" if kept else None
        if file:
            write_shard(self.folder / file, [row["row"] for row in kept])
        part = {
            "order": rows[0]["order"],
            "file": file,
            "rows": len(kept),
            "rows_read": len(rows),
            "dropped": Counter(row["dropped"] for row in rows if row["dropped"]),
            "tokens": sum(row["tokens"] for row in kept),
            "loss_tokens": sum(row["loss_tokens"] for row in kept),
            "fault": next((row["fault"] for row in rows if row["fault"]), None),
        }
        return {"part": [json.dumps(part)]}


def _source_fingerprint(files: list[Path]) -> str:
    return fingerprint([(file.name, file_sha256(file)) for file in files])


def _manifest(parts: list[_Part], config: DataConfig, folder: Path, tokenizer: Tokenizer, probe: str, source: str) -> Manifest:
    dropped: Counter[str] = Counter()
    for part in parts:
        dropped.update(part.dropped)
    kept, tokens = sum(part.rows for part in parts), sum(part.tokens for part in parts)
    return Manifest(
        rows_read=sum(part.rows_read for part in parts),
        rows_kept=kept,
        rows_dropped=dict(sorted(dropped.items())),
        tokens=tokens,
        loss_tokens=sum(part.loss_tokens for part in parts),
        padding_fraction=1 - tokens / (kept * config.max_seq_len) if kept else 0.0,
        seq_len=config.max_seq_len,
        tokenizer=tokenizer.fingerprint(),
        source=source,
        template=f"reasoning: {config.reasoning}; loss: final answer" if probe else "raw text; loss: every token",
        probe=probe,
        shards=number_shards(folder, {part.file: part.rows for part in parts if part.file}),
    )

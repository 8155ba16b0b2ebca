"""The data stage on real Ray Data: counts, masks, order, errors; and the Grain source that reads its shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_ray.data.config import DataConfig
from gemma_ray.data.prepare import prepare, prepare_text
from gemma_ray.data.readers import parse_codev, source_files
from gemma_ray.data.records import pack_row, unpack_row
from gemma_ray.data.shards import check_shards, read_manifest
from gemma_ray.data.show import loss_free_prefixes, marked_text, shown_rows
from gemma_ray.data.source import batches
from gemma_ray.errors import DataError, RecipeError
from gemma_ray.models.tokenizer import Tokenizer
from gemma_ray.recipe import parse_recipe

CONFIG = DataConfig(max_seq_len=128, rows_per_shard=8)


def record(i: int, answer: str | None = None) -> dict[str, str]:
    code = f"```verilog\nmodule TopModule;\n  // {i}\nendmodule\n```"
    return {
        "prompt": f"Make number {i}.",
        "response": f"<think>\nhm {i}\n</think>\n<answer>\n{code if answer is None else answer}\n</answer>",
    }


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return path


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=40)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def prepared(tiny_gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write(folder / "a.jsonl", [record(i) for i in range(20)])
    bad = [record(90, "no fence"), {"prompt": "p", "response": "no answer"}, {"prompt": " ", "response": "<answer>x</answer>"}]
    write(folder / "b.jsonl", [*bad, record(91, "```verilog\nmodule m; " + "wire x; " * 200 + "endmodule\n```"), "", record(20)])
    prepare(CONFIG, str(folder), tiny_gemma, folder / "out")
    return folder / "out"


def test_rows_are_counted_by_reason(prepared: Path) -> None:
    manifest = read_manifest(prepared)
    assert (manifest.rows_read, manifest.rows_kept) == (25, 21)
    assert manifest.rows_dropped == {"no_answer": 1, "no_module": 1, "no_prompt": 1, "too_long": 1}
    assert sum(shard.rows for shard in manifest.shards) == 21
    assert len(manifest.shards) > 1
    assert manifest.padding_fraction == pytest.approx(1 - manifest.tokens / (21 * 128))
    check_shards(prepared, manifest)


def test_only_the_answer_bears_loss_and_reasoning_is_left_out(prepared: Path, tiny_gemma: Path) -> None:
    rows = shown_rows(prepared, tiny_gemma, 21)
    for i, row in enumerate(rows):
        bearing = "".join(token.text for token in row if token.bears_loss)
        assert bearing == f"```verilog\nmodule TopModule;\n  // {i}\nendmodule\n```<turn|>"
        assert "hm" not in "".join(token.text for token in row)
    assert marked_text(rows[0], color=False).count("⟦") == sum(token.bears_loss for token in rows[0])
    assert sum(token.bears_loss for row in rows for token in row) == read_manifest(prepared).loss_tokens


def test_reasoning_as_context_bears_no_loss(tmp_path: Path, tiny_gemma: Path) -> None:
    source = write(tmp_path / "a.jsonl", [record(3)])
    prepare(CONFIG.model_copy(update={"reasoning": "context"}), str(source), tiny_gemma, tmp_path / "out")
    (row,) = shown_rows(tmp_path / "out", tiny_gemma, 5)
    text = "".join(token.text for token in row)
    assert "<|channel>thought\nhm 3\n<channel|>" in text
    assert "hm" not in "".join(token.text for token in row if token.bears_loss)


def test_the_same_source_gives_the_same_bytes(prepared: Path, tiny_gemma: Path, tmp_path: Path) -> None:
    again = prepare(CONFIG, str(prepared.parent), tiny_gemma, tmp_path / "again")
    assert again == read_manifest(prepared)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([record(0), "{not json"], r"a\.jsonl:2: not a line of JSON"),
        ([record(0), "[1, 2]"], r"a\.jsonl:2: a record is an object"),
        ([{"prompt": "p", "completion": "c"}], r"a\.jsonl:1: needs text under 'response'; the record has completion, prompt"),
        ([{"prompt": 3, "response": "c"}], "needs text under 'prompt', which is a number"),
        ([{"prompt": None, "response": "c"}], "needs text under 'prompt', which is null"),
        ([record(0), '{"prompt": ' + "9" * 5000 + "}"], r"a\.jsonl:2: not a line of JSON \(Exceeds the limit \(4300 digits\)"),
        ([record(0), "[" * 200_000], r"a\.jsonl:2: not a line of JSON"),
        ([record(0), {**record(1), "prompt": "a\ud800"}], r"a\.jsonl:2: 'prompt' holds \\ud800, half of a character, at 1"),
        ([{f"key{i:04}\ud800": i for i in range(3000)}], r"key0007\\ud800 and 2992 more$"),
        ([], "not one record"),
        ([record(0, "no module")], r"all 1 rows were dropped \(no_module 1\)"),
    ],
)
def test_bad_data_is_refused_and_nothing_is_left(records: list[Any], message: str, tiny_gemma: Path, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", records)
    with pytest.raises(DataError, match=message):
        prepare(CONFIG, str(tmp_path / "a.jsonl"), tiny_gemma, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_bytes_that_are_not_utf8_are_refused(tiny_gemma: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff", "response": ""}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1"):
        prepare(CONFIG, str(tmp_path / "a.jsonl"), tiny_gemma, tmp_path / "out")


@pytest.mark.parametrize("source", ["nowhere.jsonl", "*.nothing", "gs://bucket/a.jsonl"])
def test_a_source_that_is_not_there_is_refused(source: str) -> None:
    with pytest.raises(DataError, match=r"data\.source"):
        source_files(source)


def test_a_batch_is_padded_and_its_order_is_the_seeds(prepared: Path) -> None:
    def first(seed: int, count: int) -> list[dict[str, np.ndarray]]:
        iterator = batches(prepared, batch_size=4, seq_len=128, seed=seed)
        return [next(iterator) for _ in range(count)]

    one, same, other = first(1, 12), first(1, 12), first(2, 12)
    assert all(np.array_equal(a["tokens"], b["tokens"]) for a, b in zip(one, same, strict=True))
    assert not np.array_equal(one[0]["tokens"], other[0]["tokens"])
    for batch in one:  # 48 rows: more than two epochs of 21
        assert batch["tokens"].shape == (4, 128)
        assert not batch["tokens"][~(batch["segments"] > 0)].any()
        assert not (batch["loss_mask"] & ~(batch["segments"] > 0)).any()
    assert not np.array_equal(one[0]["tokens"], one[5]["tokens"])


def test_a_restored_state_continues_exactly(prepared: Path) -> None:
    iterator = batches(prepared, batch_size=4, seq_len=128, seed=3)
    for _ in range(7):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = [next(iterator)["tokens"] for _ in range(4)]
    resumed = batches(prepared, batch_size=4, seq_len=128, seed=3)
    resumed.set_state(state)
    assert all(np.array_equal(next(resumed)["tokens"], tokens) for tokens in expected)


def test_a_changed_shard_is_noticed(prepared: Path, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "data"
    shutil.copytree(prepared, folder)
    manifest = read_manifest(folder)
    with (folder / manifest.shards[0].file).open("r+b") as f:
        f.seek(70_000)
        f.write(b"x")
    with pytest.raises(DataError, match="not those that manifest"):
        check_shards(folder, manifest)
    (folder / manifest.shards[0].file).unlink()
    with pytest.raises(DataError, match="missing"):
        check_shards(folder, manifest)


def test_rows_longer_than_the_recipe_are_refused(prepared: Path) -> None:
    with pytest.raises(DataError, match="max_seq_len"):
        batches(prepared, batch_size=4, seq_len=64, seed=0)


def test_prompts_are_what_stands_before_the_loss(prepared: Path, tiny_gemma: Path) -> None:
    prefixes = loss_free_prefixes(prepared, 3)
    assert len(prefixes) == 3
    assert Tokenizer(tiny_gemma).decode(prefixes[0]).endswith("<|turn>model\n")


def test_raw_text_becomes_full_rows_that_all_bear_loss(tiny_gemma: Path, tmp_path: Path) -> None:
    texts = [f"module m{i};\nendmodule\n" for i in range(40)]
    manifest = prepare_text(texts, tiny_gemma, 32, tmp_path / "text")
    assert manifest.loss_tokens == manifest.tokens == manifest.rows_kept * 32
    tokenizer = Tokenizer(tiny_gemma)
    stream = [t for text in texts for t in [*tokenizer.encode(text).ids, 1]]
    rows = shown_rows(tmp_path / "text", tiny_gemma, 1000)
    assert [token.id for row in rows for token in row[1:]] == stream[: len(rows) * 31]
    with pytest.raises(DataError, match="do not fill one row"):
        prepare_text(["a"], tiny_gemma, 32, tmp_path / "short")


def test_a_row_survives_packing() -> None:
    rng = np.random.default_rng(0)
    for length in (1, 7, 8, 9, 300):
        tokens, mask = rng.integers(0, 262_144, length), rng.random(length) < 0.5
        back, bits = unpack_row(pack_row(tokens.tolist(), mask.tolist()))
        assert np.array_equal(back, tokens)
        assert np.array_equal(bits, mask)
    with pytest.raises(DataError):
        unpack_row(b"\x05\x00\x00\x00abc")


def test_a_codev_record_is_taken_apart() -> None:
    parsed = parse_codev(record(5), "here")
    assert (parsed.prompt, parsed.reasoning) == ("Make number 5.", "hm 5")
    assert parsed.answer.startswith("```verilog\nmodule")


def test_a_record_as_deep_as_can_be_read_is_read(tiny_gemma: Path, tmp_path: Path) -> None:
    deep = json.dumps(record(1))[:-1] + ', "more": ' + "[" * 900 + "]" * 900 + "}"
    source = write(tmp_path / "a.jsonl", [record(0), deep])
    assert prepare(CONFIG, str(source), tiny_gemma, tmp_path / "out").rows_kept == 2


def test_a_system_prompt_with_half_a_character_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"data\.system_prompt.*half of a character"):
        parse_recipe({"data": {"system_prompt": "a\ud800"}})


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_rows_of_a_damaged_shard_are_not_shown(prepared: Path, tiny_gemma: Path, tmp_path: Path, damage: str) -> None:
    import shutil

    folder = tmp_path / "data"
    shutil.copytree(prepared, folder)
    shard = folder / read_manifest(folder).shards[0].file
    shard.unlink() if damage == "missing" else shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(DataError, match=rf"{shard.name}: .*run `gemma-ray data prepare`"):
        shown_rows(folder, tiny_gemma, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows_kept": "x"}, "rows_kept: Input should be a valid integer"),
        ({"shards": [{"file": "a", "rows": "x", "sha256": ""}]}, "shards.0.rows: Input should be a valid integer"),
        ({"shards": None}, "shards: Input should be a valid"),
        ([], "the file: Input should be an object"),
    ],
)
def test_a_manifest_of_other_types_is_refused(prepared: Path, tmp_path: Path, change: Any, message: str) -> None:
    manifest = json.loads((prepared / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, **change} if isinstance(change, dict) else change))
    with pytest.raises(DataError, match=rf"manifest\.json: not a manifest \({message}.*run `gemma-ray data prepare`"):
        read_manifest(tmp_path)

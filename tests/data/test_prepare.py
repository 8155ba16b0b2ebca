"""The data stage on real Ray Data: counts, masks, order, errors, and what is left after a kill."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_ray.data.config import DataConfig
from gemma_ray.data.files import source_files
from gemma_ray.data.page import write_page
from gemma_ray.data.prepare import prepare, prepare_text
from gemma_ray.data.records import pack_row, unpack_row
from gemma_ray.data.shards import DROPPED, check_shards, read_manifest
from gemma_ray.data.show import examples, loss_free_prefixes, marked_text, rows, shown_examples
from gemma_ray.errors import DataError, ModelError, RecipeError
from gemma_ray.models.template_check import PROBES, check_probes
from gemma_ray.models.templates import Tokens
from gemma_ray.models.tokenizer import Tokenizer
from gemma_ray.recipe import parse_recipe

CONFIG = DataConfig(max_seq_len=128, rows_per_shard=8, near_duplicates=None, bad_lines=0)


def record(i: int, answer: str | None = None) -> dict[str, str]:
    code = f"```verilog\nmodule TopModule;\n  // {i}\nendmodule\n```"
    return {
        "prompt": f"Make number {i}.",
        "response": f"<think>\nhm {i}\n</think>\n<answer>\n{code if answer is None else answer}\n</answer>",
    }


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return path


def changed(**change: Any) -> DataConfig:
    return CONFIG.model_copy(update=change)


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=40)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def prepared(tiny_gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("prepared")
    folder = place / "source"
    folder.mkdir()
    write(folder / "a.jsonl", [record(i) for i in range(20)])
    bad = [record(90, "no fence"), {"prompt": "p", "response": "no answer"}, {"prompt": " ", "response": "<answer>x</answer>"}]
    long = record(91, "```verilog\nmodule m; " + "wire x; " * 200 + "endmodule\n```")
    write(folder / "b.jsonl", [*bad, long, "", record(20), record(3), record(92, "```verilog\nmodule m; endmodule")])
    prepare(CONFIG, source_files(str(folder)), tiny_gemma, place / "out")
    return place / "out"


@pytest.fixture(scope="module")
def source(prepared: Path) -> str:
    return str(prepared.parent / "source")


def test_a_long_system_prompt_makes_no_near_duplicates(tiny_gemma: Path, tmp_path: Path) -> None:
    """Alike is what examples say themselves: one of three says the same as another."""
    asked = ("an adder of two bytes", "a counter that stops at nine", "a counter that stops at nine and then says nine, nine, nine")
    said = [
        {"prompt": f"Make {what}.", "response": f"<answer>```verilog\nmodule m{i}; endmodule\n```</answer>"} for i, what in enumerate(asked)
    ]
    source = write(tmp_path / "a.jsonl", [*said, {**said[2], "prompt": said[2]["prompt"] + " "}])
    config = changed(max_seq_len=2048, near_duplicates=0.5, system_prompt=" ".join(f"Rule {i}: be brief." for i in range(60)))
    manifest = prepare(config, source_files(str(source)), tiny_gemma, tmp_path / "out")
    assert (manifest.rows_kept, manifest.rows_dropped) == (3, {"duplicate": 1})


def test_examples_are_counted_by_reason_and_listed(prepared: Path) -> None:
    manifest = read_manifest(prepared)
    assert (manifest.rows_read, manifest.rows_kept) == (27, 21)
    assert manifest.rows_dropped == {
        "duplicate": 1,
        "no_answer": 1,
        "no_module": 1,
        "no_prompt": 1,
        "too_long": 1,
        "unbalanced_fences": 1,
    }
    assert manifest.schemas == {"codev-sft": 27}
    assert sum(shard.examples for shard in manifest.shards) == 21
    assert sum(manifest.example_lengths.values()) == 21
    assert len(manifest.shards) == 3
    check_shards(prepared, manifest)
    listed = [json.loads(line) for line in (prepared / DROPPED).read_text().splitlines()]
    b = prepared.parent / "source" / "b.jsonl"
    assert {(line["where"], line["reason"]) for line in listed} == {
        (f"{b}:1", "no_module"),
        (f"{b}:2", "no_answer"),
        (f"{b}:3", "no_prompt"),
        (f"{b}:4", "too_long"),
        (f"{b}:7", "duplicate"),
        (f"{b}:8", "unbalanced_fences"),
    }
    assert next(line["detail"] for line in listed if line["reason"] == "duplicate") == f"like {prepared.parent / 'source' / 'a.jsonl'}:4"


def test_rows_are_packed_and_no_example_is_cut(prepared: Path) -> None:
    manifest = read_manifest(prepared)
    found = list(rows(prepared))
    assert (len(found), manifest.layout) == (manifest.sequences, "packed")
    assert manifest.sequences < manifest.rows_kept
    assert all(len(row.tokens) <= 128 for row in found)
    assert manifest.padding_fraction == pytest.approx(1 - manifest.tokens / (manifest.sequences * 128))
    for row in found:
        starts = np.flatnonzero(row.positions == 0)
        assert len(starts) == len(row.lengths) == row.segments[-1]
        assert (row.tokens[starts] == 2).all()  # <bos>


def test_only_the_answer_bears_loss_and_reasoning_is_left_out(prepared: Path, tiny_gemma: Path) -> None:
    shown = shown_examples(prepared, tiny_gemma, 21)
    bearing = ["".join(token.text for token in example if token.bears_loss) for example in shown]
    assert sorted(bearing) == sorted(f"```verilog\nmodule TopModule;\n  // {i}\nendmodule\n```<turn|>" for i in range(21))
    assert all("hm" not in "".join(token.text for token in example) for example in shown)
    assert marked_text(shown[0], color=False).count("⟦") == sum(token.bears_loss for token in shown[0])
    assert sum(token.bears_loss for example in shown for token in example) == read_manifest(prepared).loss_tokens


@pytest.mark.parametrize(
    ("loss", "reasoning", "bears"), [("final_answer", "keep", False), ("assistant", "keep", True), ("assistant", "drop", False)]
)
def test_reasoning_bears_loss_as_the_recipe_says(tmp_path: Path, tiny_gemma: Path, loss: str, reasoning: str, bears: bool) -> None:
    source = write(tmp_path / "a.jsonl", [record(3)])
    prepare(changed(reasoning=reasoning, loss=loss), source_files(str(source)), tiny_gemma, tmp_path / "out")
    (example,) = shown_examples(tmp_path / "out", tiny_gemma, 5)
    assert ("<|channel>thought\nhm 3\n<channel|>" in "".join(token.text for token in example)) == (reasoning == "keep")
    assert ("hm 3" in "".join(token.text for token in example if token.bears_loss)) == bears


def test_the_same_source_gives_the_same_bytes(prepared: Path, source: str, tiny_gemma: Path, tmp_path: Path) -> None:
    again = prepare(CONFIG, source_files(source), tiny_gemma, tmp_path / "again")
    assert again == read_manifest(prepared)
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


@pytest.mark.parametrize("chunk_bytes", [40, 300, 1 << 20])
def test_chunks_of_any_size_give_the_same_examples_and_places(
    prepared: Path, source: str, tiny_gemma: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    from gemma_ray.data import files
    from gemma_ray.data import prepare as module

    monkeypatch.setattr(module, "chunks", lambda found: files.chunks(found, chunk_bytes))
    prepare(CONFIG, source_files(source), tiny_gemma, tmp_path / "out")
    assert [shard.sha256 for shard in read_manifest(tmp_path / "out").shards] == [shard.sha256 for shard in read_manifest(prepared).shards]
    assert (tmp_path / "out" / DROPPED).read_text() == (prepared / DROPPED).read_text()


def test_the_page_shows_rows_lengths_and_what_was_left_out(prepared: Path, tiny_gemma: Path, tmp_path: Path) -> None:
    page = write_page(prepared, tiny_gemma, 2, tmp_path / "page.html").read_text()
    manifest = read_manifest(prepared)
    assert page.count('<section class="packed">') == 2
    assert page.count('<div class="document">') == sum(len(row.lengths) for row in itertools.islice(rows(prepared), 2))
    assert page.count('class="loss" title=') == sum(int(row.loss.sum()) for row in itertools.islice(rows(prepared), 2))
    assert "&lt;bos&gt;" in page
    assert "<bos>" not in page
    assert all(f"<td>{reason}</td>" in page for reason in manifest.rows_dropped)
    assert "b.jsonl:4 — " in page


def test_a_model_whose_template_has_changed_since_is_refused(prepared: Path, tiny_gemma: Path, tmp_path: Path) -> None:
    probes = read_manifest(prepared).probes
    assert len(probes) == len(PROBES)
    check_probes(tiny_gemma, probes)
    with pytest.raises(ModelError, match=r"renders a probe as .*; in training it was 'other'.*train again"):
        check_probes(tiny_gemma, [*probes[:2], "other", *probes[3:]])
    check_probes(tiny_gemma, [])  # raw text has none


def test_what_was_finished_before_a_kill_is_not_done_again(
    prepared: Path, source: str, tiny_gemma: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemma_ray.data import files
    from gemma_ray.data import prepare as module

    monkeypatch.setattr(module, "chunks", lambda found: files.chunks(found, 1000))
    finish, notes = module._finish, []

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_finish", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(CONFIG, source_files(source), tiny_gemma, tmp_path / "out")
    (work,) = tmp_path.iterdir()
    finished = {path.name: path.stat().st_mtime_ns for path in work.glob("chunk-*")}
    assert len(finished) > 3
    (work / "chunk-000002.arrow").unlink()
    monkeypatch.setattr(
        module, "_finish", lambda *rest: (notes.append({p.name: p.stat().st_mtime_ns for p in work.glob("chunk-*")}), finish(*rest))[1]
    )
    prepare(CONFIG, source_files(source), tiny_gemma, tmp_path / "out")
    assert {name for name, time in notes[0].items() if finished[name] != time} == {"chunk-000002.arrow"}
    assert (tmp_path / "out" / DROPPED).read_text() == (prepared / DROPPED).read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_leaves_what_is_finished_and_nothing_half_written(
    prepared: Path, source: str, tiny_gemma: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemma_ray.data import prepare as module

    class Full(module.ShardJob):
        def __call__(self, number: int, places: Any) -> None:
            if number == 1:
                raise OSError(28, "No space left on device")
            super().__call__(number, places)

    monkeypatch.setattr(module, "ShardJob", Full)
    with pytest.raises(OSError, match="No space left"):
        prepare(CONFIG, source_files(source), tiny_gemma, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert prepare(CONFIG, source_files(source), tiny_gemma, tmp_path / "out") == read_manifest(prepared)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([record(0), "{not json"], r"a\.jsonl:2: not a line of JSON"),
        ([record(0), "[1, 2]"], r"a\.jsonl:2: a record is an object, not a list"),
        ([record(0), "", "{}"], r"a\.jsonl:3: no known columns: the record has none; wanted are prompt and response.*data\.columns"),
        ([{"prompt": 3, "response": "c"}], "'prompt' is a number; wanted is text"),
        ([{"prompt": None, "response": "c"}], "'prompt' is null"),
        ([record(0), '{"prompt": ' + "9" * 5000 + "}"], r"a\.jsonl:2: not a line of JSON \(Exceeds the limit \(4300 digits\)"),
        ([record(0), "[" * 200_000], r"a\.jsonl:2: not a line of JSON"),
        ([{f"key{i:04}\ud800": i for i in range(3000)}], r"key0007\\ud800 and 2992 more;"),
        ([record(0), *["{"] * 5], r"a\.jsonl:2: .*a\.jsonl:3: .*a\.jsonl:4: .* and 2 more \(5 of 6 records; data\.bad_lines=0\)"),
        ([], "not one record"),
        ([record(0, "no module")], r"all 1 rows were dropped \(no_module 1\), the first .*a\.jsonl:1: no_module"),
        ([record(0, "```verilog\nmodule m; " + "wire x; " * 200 + "endmodule\n```")], r"too_long 1.*tokens; data\.max_seq_len is 128"),
    ],
)
def test_bad_data_is_refused_and_nothing_is_left(records: list[Any], message: str, tiny_gemma: Path, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", records)
    with pytest.raises(DataError, match=message):
        prepare(CONFIG, source_files(str(tmp_path / "a.jsonl")), tiny_gemma, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_some_bad_lines_are_counted_when_the_recipe_allows_them(tiny_gemma: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [record(0), "{", {**record(1), "prompt": "a\ud800"}, {**record(1), "prompt": "bell \x07"}])
    manifest = prepare(changed(bad_lines=1), source_files(str(source)), tiny_gemma, tmp_path / "out")
    assert manifest.rows_dropped == {"encoding": 2, "malformed": 1}


@pytest.mark.parametrize(("rule", "kept"), [("drop", 1), ("truncate", 3)])
def test_what_is_longer_than_a_row(tiny_gemma: Path, tmp_path: Path, rule: str, kept: int) -> None:
    long = {"prompt": "Make it. " + "Long words. " * 60, "response": record(1)["response"]}
    thinks = {"prompt": "Make two.", "response": "<think>" + "well " * 200 + record(2)["response"].removeprefix("<think>")}
    source = write(tmp_path / "a.jsonl", [record(0), long, thinks])
    manifest = prepare(changed(too_long=rule, reasoning="keep"), source_files(str(source)), tiny_gemma, tmp_path / "out")
    assert (manifest.rows_kept, manifest.rows_truncated) == (kept, kept - 1)
    for example in shown_examples(tmp_path / "out", tiny_gemma, 3):
        assert len(example) <= 128
        assert "".join(token.text for token in example if token.bears_loss).endswith("endmodule\n```<turn|>")
    refused = write(tmp_path / "b.jsonl", [record(0), long, long])
    with pytest.raises(DataError, match=r"b\.jsonl:2: \d+ tokens; .*b\.jsonl:3: .*data\.too_long=refuse"):
        prepare(changed(too_long="refuse"), source_files(str(refused)), tiny_gemma, tmp_path / "x")


def test_a_tokenizer_that_is_not_the_manifests_is_refused(prepared: Path, tiny_gemma: Path, tmp_path: Path) -> None:
    other = tmp_path / "model"
    shutil.copytree(tiny_gemma, other)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    with pytest.raises(DataError, match="prepared with another tokenizer"):
        shown_examples(prepared, other, 1)


def test_bytes_that_are_not_utf8_are_refused(tiny_gemma: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff", "response": ""}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1"):
        prepare(CONFIG, source_files(str(tmp_path / "a.jsonl")), tiny_gemma, tmp_path / "out")


def test_a_changed_shard_is_noticed(prepared: Path, tmp_path: Path) -> None:
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


def test_prompts_are_what_stands_before_the_loss(prepared: Path, tiny_gemma: Path) -> None:
    prefixes = loss_free_prefixes(prepared, 3)
    assert len(prefixes) == 3
    assert Tokenizer(tiny_gemma).decode(prefixes[0]).endswith("<|turn>model\n")


def test_raw_text_becomes_full_rows_that_all_bear_loss(tiny_gemma: Path, tmp_path: Path) -> None:
    texts = [f"module m{i};\nendmodule\n" for i in range(40)]
    manifest = prepare_text(texts, tiny_gemma, 32, tmp_path / "text")
    assert manifest.loss_tokens == manifest.tokens == manifest.sequences * 32
    tokenizer = Tokenizer(tiny_gemma)
    stream = [t for text in texts for t in [*tokenizer.encode(text).ids, 1]]
    found = list(examples(tmp_path / "text"))
    assert [int(i) for row in found for i in row.ids[1:]] == stream[: len(found) * 31]
    with pytest.raises(DataError, match="do not fill one row"):
        prepare_text(["a"], tiny_gemma, 32, tmp_path / "short")


def test_a_row_survives_packing() -> None:
    rng = np.random.default_rng(0)
    for lengths in ([1], [7, 8], [9, 1, 300]):
        documents = [Tokens(rng.integers(0, 262_144, n).astype(np.int32), rng.random(n) < 0.5) for n in lengths]
        row = unpack_row(pack_row(documents))
        assert row.lengths.tolist() == lengths
        assert np.array_equal(row.tokens, np.concatenate([document.ids for document in documents]))
        assert np.array_equal(row.loss, np.concatenate([document.loss for document in documents]))
    for damaged in (b"", b"\x05\x00\x00\x00abc", b"\xff\xff\xff\xff" * 3, pack_row(documents)[:-1]):
        with pytest.raises(DataError):
            unpack_row(damaged)


def test_a_record_as_deep_as_can_be_read_is_read(tiny_gemma: Path, tmp_path: Path) -> None:
    deep = json.dumps(record(1))[:-1] + ', "more": ' + "[" * 900 + "]" * 900 + "}"
    source = write(tmp_path / "a.jsonl", [record(0), deep])
    assert prepare(CONFIG, source_files(str(source)), tiny_gemma, tmp_path / "out").rows_kept == 2


def test_a_system_prompt_with_half_a_character_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"data\.system_prompt.*half of a character"):
        parse_recipe({"data": {"system_prompt": "a\ud800"}})


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_rows_of_a_damaged_shard_are_not_shown(prepared: Path, tiny_gemma: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "data"
    shutil.copytree(prepared, folder)
    shard = folder / read_manifest(folder).shards[0].file
    shard.unlink() if damage == "missing" else shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(DataError, match=rf"{shard.name}: .*run `gemma-ray data prepare`"):
        shown_examples(folder, tiny_gemma, 1)


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

"""Files of every kind and schema to conversations, and what is said of those that are none."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cloud_storage import cloud_storage

from gemma_ray.data.files import Cut, chunks, files_fingerprint, source_files
from gemma_ray.data.readers import read_cut
from gemma_ray.data.schemas import Dropped, Example, read_example, schema_of
from gemma_ray.errors import DataError, RecipeError
from gemma_ray.models.templates import Turn
from gemma_ray.recipe import parse_recipe

RECORDS = [{"prompt": f"p{i}", "completion": f"c{i} é"} for i in range(30)]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()


def write_stream(path: Path) -> None:
    table = pa.Table.from_pylist(RECORDS)
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_file(path: Path) -> None:
    table = pa.Table.from_pylist(RECORDS)
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


FILES: dict[str, Any] = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "a.ndjson": lambda path: path.write_bytes(LINES.rstrip(b"\n")),
    "mark.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + LINES),
    "windows.jsonl": lambda path: path.write_bytes(LINES.replace(b"\n", b"\r\n")),
    "blank.jsonl": lambda path: path.write_bytes(LINES.replace(b"\n", b"\n\n  \n")),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "a.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(LINES)),
    "a.parquet": lambda path: pq.write_table(pa.Table.from_pylist(RECORDS), path, row_group_size=7),
    "a.arrow": write_file,
    "stream.arrow": write_stream,
    "no_suffix": lambda path: path.write_bytes(LINES),
    "parquet_without": lambda path: pq.write_table(pa.Table.from_pylist(RECORDS), path),
}


@pytest.mark.parametrize("chunk_bytes", [1, 97, 1 << 20])
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_any_kind_is_read_whole_however_it_is_cut(tmp_path: Path, name: str, chunk_bytes: int) -> None:
    FILES[name](tmp_path / name)
    groups = chunks(source_files(str(tmp_path / name)), chunk_bytes)
    entries = [entry for group in groups for cut in group for entry in read_cut(cut) if not entry.is_blank]
    assert [entry.record for entry in entries] == RECORDS
    if chunk_bytes == 1 and name not in ("a.jsonl.gz", "a.jsonl.bz2", "stream.arrow", "parquet_without"):
        assert len(groups) > 4


def test_line_numbers_count_empty_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\n{"a": 1}\n\n\n{"b": 2}\n')
    (file,) = source_files(str(tmp_path))
    assert [entry.number for entry in read_cut(Cut(file, 0, file.size)) if entry.record] == [2, 5]


def test_a_folder_is_searched_and_what_is_no_data_left_out(tmp_path: Path) -> None:
    for name in ("b/c.parquet", "a.jsonl", "b/_SUCCESS", ".hidden.jsonl", "_x/a.jsonl", "readme.txt", "b/a.jsonl.gz"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        FILES["a.parquet" if name.endswith("parquet") else "a.jsonl.gz" if name.endswith("gz") else "a.jsonl"](path)
    found = source_files(str(tmp_path))
    assert [Path(file.path).relative_to(tmp_path).as_posix() for file in found] == ["a.jsonl", "b/a.jsonl.gz", "b/c.parquet"]
    assert [file.path for file in source_files(f"file://{tmp_path}")] == [f"file://{file.path}" for file in found]
    assert [Path(file.path).name for file in source_files(f"file://{tmp_path}/b/*.parquet")] == ["c.parquet"]
    assert [Path(file.path).name for file in source_files(f"{tmp_path}/**/*.parquet")] == ["c.parquet"]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address of a bucket on Cloud Storage with every kind of file in its folder `data`, and the query that goes with it."""
    folder = tmp_path_factory.mktemp("buckets")
    (folder / "bucket" / "data").mkdir(parents=True)
    for name, write in FILES.items():
        write(folder / "bucket" / "data" / name)
    with cloud_storage(folder) as query:
        yield "gs://anonymous@bucket", query


@pytest.mark.parametrize("name", FILES)
def test_cloud_storage_is_read_like_a_disk(bucket: tuple[str, str], name: str) -> None:
    address, query = bucket
    files = source_files(f"{address}/data/{name}{query}")
    entries = [entry for group in chunks(files, 97) for cut in group for entry in read_cut(cut) if not entry.is_blank]
    assert [entry.record for entry in entries] == RECORDS


def test_a_row_that_python_cannot_hold_is_a_fault_of_its_own(tmp_path: Path) -> None:
    bad = pa.Array.from_buffers(pa.string(), 3, [None, pa.py_buffer(np.array([0, 1, 2, 3], "<i4")), pa.py_buffer(b"a\xffc")])
    late = pa.array([0, 0, 2**62], pa.timestamp("us"))
    pq.write_table(pa.table({"prompt": bad, "when": late}), tmp_path / "a.parquet")
    (file,) = source_files(str(tmp_path))
    good, *faults = read_cut(Cut(file, 0, 1))
    assert good.record is not None
    assert good.record["prompt"] == "a"
    assert [(entry.number, entry.record, entry.fault[:25]) for entry in faults] == [(n, None, "holds what cannot be read") for n in (2, 3)]


def test_cloud_storage_is_searched_like_a_disk(bucket: tuple[str, str], tmp_path: Path) -> None:
    address, query = bucket
    named = [name for name in sorted(FILES) if "." in name]
    for place in (address, f"{address}/data", f"{address}/d*/*.*"):
        found = source_files(place + query)
        assert [file.path for file in found] == [f"{address}/data/{name}{query}" for name in named]
    assert files_fingerprint(found) == files_fingerprint(source_files(f"{address}/data{query}&project_id=other"))
    for missing in (f"{address}/none{query}", f"gs://anonymous@none/data{query}"):
        with pytest.raises(DataError, match="no such file, and no"):
            source_files(missing)


def test_a_file_whose_name_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"a\xff.jsonl")).write_bytes(LINES)
    with pytest.raises(DataError, match=r"a\\udcff\.jsonl'.*rename the file"):
        source_files(str(tmp_path))


def test_a_source_is_its_content_wherever_it_lies(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_bytes(LINES)
    one, two = (source_files(str(tmp_path / folder)) for folder in ("one", "two"))
    assert files_fingerprint(one) == files_fingerprint(two)
    (tmp_path / "two" / "a.jsonl").write_bytes(LINES + b"{}\n")
    assert files_fingerprint(one) != files_fingerprint(source_files(str(tmp_path / "two")))


def test_many_small_files_are_read_together(tmp_path: Path) -> None:
    for i in range(500):
        (tmp_path / f"{i:04}.jsonl").write_bytes(b'{"a": %d}\n' % i)
    (group,) = chunks(source_files(str(tmp_path)))
    assert len(group) == 500


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n".join(map(str, RECORDS)).encode("utf-16"), "UTF-16 text; write it as UTF-8"),
        (b"\x7fELF\x00\x01\n", "a binary file, not lines of JSON"),
        (b"[\n{}\n]\n", "one JSON list; write each of its records as a line"),
    ],
)
def test_a_file_that_is_no_lines_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    (file,) = source_files(str(tmp_path))
    with pytest.raises(DataError, match=rf"a\.jsonl: {message}"):
        list(read_cut(Cut(file, 0, file.size)))


@pytest.mark.parametrize(("name", "kind"), [("a.parquet", "parquet"), ("a.arrow", "arrow"), ("a.jsonl.gz", "lines")])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, kind: str) -> None:
    FILES[name](tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=rf"{name}: "):
        [entry for group in chunks(source_files(str(tmp_path))) for cut in group for entry in read_cut(cut)]
    assert source_files(str(tmp_path))[0].kind == kind


@pytest.mark.parametrize(
    "source", ["nowhere.jsonl", "*.nothing", "nothing://bucket/a.jsonl", "file:///nowhere/a.jsonl", "gs://bucket?endpoint_override=%"]
)
def test_a_source_that_is_not_there_is_refused(source: str) -> None:
    with pytest.raises(DataError, match=r"data\.source"):
        source_files(source)


CODE = "module m;\nendmodule"
RL = [{"role": "system", "content": "Think."}, {"role": "user", "content": "Make m."}]
ANSWER = f"```verilog\n{CODE}\n```"


@pytest.mark.parametrize(
    ("record", "schema", "expected"),
    [
        (
            {"prompt": " q ", "response": f"<think> t </think>\n<answer>\n{ANSWER}\n</answer>"},
            "codev-sft",
            Example((Turn("q", ANSWER, "t"),), None),
        ),
        ({"prompt": "q", "response": "<think>t</think> cut off"}, "codev-sft", Dropped("no_answer")),
        (
            {"prompt": "q", "response": f"<think>in <answer>wrong</answer>, or <answer> tags</think><answer>{ANSWER}</answer>"},
            "codev-sft",
            Example((Turn("q", ANSWER, "in <answer>wrong</answer>, or <answer> tags"),), None),
        ),
        ({"prompt": "q", "response": "<think>in <answer>wrong</answer>, or</think> cut"}, "codev-sft", Dropped("no_answer")),
        (
            {"prompt": "q", "response": "<answer>a <think>b</think></answer>"},
            "codev-sft",
            Example((Turn("q", "a <think>b</think>", "b"),), None),
        ),
        (
            {
                "prompt": RL,
                "reward_model": {"style": "rule", "ground_truth": pickle.dumps({"answer": {"code": CODE, "ports": {("a", 1)}}})},
            },
            "codev-rl",
            Example((Turn("Make m.", ANSWER),), "Think."),
        ),
        (
            {"prompt": RL[1:], "reward_model": {"ground_truth": json.dumps({"answer": {"code": CODE}})}},
            "codev-rl",
            Example((Turn("Make m.", ANSWER),), None),
        ),
        ({"prompt": RL, "reward_model": {"ground_truth": CODE}}, "codev-rl", Example((Turn("Make m.", ANSWER),), "Think.")),
        ({"prompt": "q", "completion": "<think>t</think> a"}, "prompt-completion", Example((Turn("q", "a", "t"),), None)),
        ({"prompt": "q", "completion": " "}, "prompt-completion", Dropped("no_answer")),
        ({"prompt": " ", "completion": "a"}, "prompt-completion", Dropped("no_prompt")),
        (
            {"prompt": RL, "completion": [{"role": "assistant", "content": "a", "reasoning_content": "t"}]},
            "prompt-completion",
            Example((Turn("Make m.", "a", "t"),), "Think."),
        ),
        (
            {
                "messages": [
                    {"role": "developer", "content": "s"},
                    {"role": "user", "content": [{"type": "text", "text": "q"}]},
                    {"role": "assistant", "content": "a"},
                    {"role": "human", "content": "q2"},
                    {"role": "model", "content": "a2", "reasoning": "t2"},
                ]
            },
            "messages",
            Example((Turn("q", "a"), Turn("q2", "a2", "t2")), "s"),
        ),
        (
            {"messages": [{"role": "assistant", "content": "a"}]},
            "messages",
            Dropped("roles", "not user and assistant by turns: assistant"),
        ),
        ({"messages": []}, "messages", Dropped("roles", "not user and assistant by turns: nobody")),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages", Dropped("roles", "a message of tool")),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages",
            Dropped("not_text", "a message holds more than text"),
        ),
        ({"prompt": "a\ud800", "completion": "a"}, "prompt-completion", Dropped("encoding", "half of a character, \\ud800")),
    ],
)
def test_records_of_every_schema(record: dict[str, Any], schema: str, expected: Example | Dropped) -> None:
    assert schema_of(record) == schema
    assert read_example(record, schema) == expected


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"prompt": "q", "answer": "a"}, Example((Turn("ask", "said"),), None)),
        ({"prompt": "q", "answer": "a", "reasoning": "t", "system": "s"}, Example((Turn("ask", "said", "thought"),), "rule")),
        ({"messages": "chat"}, Example((Turn("hi", "ho"),), None)),
    ],
)
def test_a_column_map_reads_anything_else(columns: Any, expected: Example) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    record = {"q": "ask", "a": "said", "t": "thought", "s": "rule", "chat": chat}
    assert schema_of(record, columns) == "columns"
    assert read_example(record, "columns", columns) == expected


class Evil:
    def __reduce__(self) -> Any:
        return print, ("this must not be printed",)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x", "id": 1}, r"no known columns: the record has id, text; wanted are prompt and response"),
        ({"prompt": 3, "completion": "x"}, "'prompt' is a number; wanted is text"),
        ({"prompt": RL, "reward_model": {"ground_truth": pickle.dumps(Evil())}}, "no pickle of plain values"),
        ({"prompt": RL, "reward_model": {"ground_truth": b"junk"}}, "no pickle of plain values"),
        ({"prompt": RL, "reward_model": {"ground_truth": "{"}}, "begins like JSON and is none"),
        ({"prompt": RL, "reward_model": {"ground_truth": pickle.dumps({"a": 1})}}, "holds no code"),
        ({"messages": "x"}, "'messages' is text; wanted is a list of objects"),
        ({"messages": [{"role": "user", "content": None}]}, "'content' is null; wanted is text"),
    ],
)
def test_a_record_that_cannot_be_read_says_why(record: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match=message):
        read_example(record, schema_of(record))
    assert "must not" not in capfd.readouterr().out


def test_a_column_map_that_does_not_fit_is_named() -> None:
    with pytest.raises(DataError, match=r"data\.columns names x; the record has prompt"):
        read_example({"prompt": "p"}, "columns", {"prompt": "prompt", "answer": "x"})
    with pytest.raises(RecipeError, match=r"data\.columns.*prompt and answer, or that of messages"):
        parse_recipe({"data": {"columns": {"prompt": "x"}}})

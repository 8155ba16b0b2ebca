"""Samples files that people hand in, and our own after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemma_ray.errors import DataError
from gemma_ray.evaluation.samples import Sample, begin, complete_problems, dump, read_samples

TASKS = {"Prob001_one", "Prob002_not"}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no samples in it"),
        (["", "  "], "no samples in it"),
        ([{"task_id": "Prob001_one", "sample": 0, "code": "x"}, "{not json"], r"given\.jsonl:2: not JSON"),
        (['{"task_id": "Prob001_one", "sample": 0, "co'], r"given\.jsonl:1: not JSON"),
        (["[1]"], r":1: a sample is a JSON object, not a list"),
        ([{"task_id": "Prob001_one", "code": "x"}], r":1: no sample\."),
        ([{"sample": 0, "code": "x"}], r":1: no task_id\."),
        ([{"task_id": "Prob001_one", "sample": 0}], r":1: no code or completion\."),
        ([{"task_id": "Prob001_one", "sample": "0", "code": "x"}], r":1: .*whole number from 0, not .*'0'"),
        ([{"task_id": "Prob001_one", "sample": True, "code": "x"}], r":1: .*whole number"),
        ([{"task_id": "Prob001_one", "sample": 0, "code": 7}], r":1: code is a string or null, not a int"),
        ([{"task_id": "Prob999", "sample": 0, "code": "x"}], r":1: the dataset has no problem 'Prob999' \(its first is 'Prob001_one'\)"),
        (
            [{"task_id": "Prob001_one", "sample": 0, "code": "x"}, "", {"task_id": "Prob001_one", "sample": 0, "code": "y"}],
            r":3: sample 0 of Prob001_one is already on line 1",
        ),
        (['{"task_id": "Prob001_one", "sample": ' + "9" * 5000 + ', "code": "x"}'], r"given\.jsonl:1: not JSON that can be read"),
        (["", "[" * 200_000], r"given\.jsonl:2: not JSON that can be read"),
        *(
            ([{"task_id": "Prob001_one", "sample": 0, "code": "x", key: "a\ud800"}], rf":1: {key} holds half a surrogate pair")
            for key in ("code", "completion", "prompt", "finish_reason", "error")
        ),
    ],
)
def test_a_wrong_file_is_refused_by_file_and_line(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_samples(write(tmp_path / "given.jsonl", *lines), TASKS)


@pytest.mark.parametrize("name", ["nowhere.jsonl", "x" * 300 + ".jsonl", "."])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"no samples file "):
        read_samples(tmp_path / name, TASKS)


def test_code_stands_as_given_and_a_completion_is_read(tmp_path: Path) -> None:
    module = "module TopModule(output q);\nendmodule\n"
    path = write(
        tmp_path / "given.jsonl",
        {"task_id": "Prob001_one", "sample": 0, "code": "not a module"},
        {"task_id": "Prob001_one", "sample": 1, "completion": f"```verilog\n{module}```"},
        {"task_id": "Prob001_one", "sample": 7, "completion": "no idea", "code": None},
    )
    assert [s.code for s in read_samples(path, TASKS)] == ["not a module", module, None]


def test_a_line_separator_inside_a_string_ends_no_line(tmp_path: Path) -> None:
    samples = [Sample("Prob001_one", 0, "a\u2028b\x85c", "module\u2028m;", "p\u2029")]
    path = tmp_path / "own.jsonl"
    path.write_text(dump(samples))
    assert read_samples(path, TASKS) == samples


def test_what_a_kill_cut_off_is_dropped_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    assert begin(path, {"t": 1}) == []
    samples = [Sample("Prob001_one", i, "c", None, "p", "stop") for i in range(2)] + [Sample("Prob002_not", 0, "c", None, "p", "stop")]
    with path.open("a") as f:
        f.write(dump(samples)[:-20])
    assert begin(path, {"t": 1}) == samples[:2]
    assert complete_problems(samples, 2, {"Prob001_one": "p", "Prob002_not": "p"}).keys() == {"Prob001_one"}
    assert complete_problems(samples, 2, {"Prob001_one": "another prompt"}) == {}


def test_a_damaged_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    begin(path, {"t": 1})
    whole = Sample("Prob001_one", 0, "c", None)
    path.write_text("{broken\n" + dump([whole]) + "\n" + "[" * 200_000 + "\n" + dump([whole]))
    assert begin(path, {"t": 1}) == [whole, whole]


@pytest.mark.parametrize("damaged", ["{", "{}", "[]", '"x"', "9" * 5000, "[" * 200_000, ""])
def test_samples_whose_origin_cannot_be_read_are_others(tmp_path: Path, damaged: str) -> None:
    path = tmp_path / "samples.jsonl"
    begin(path, {"t": 1})
    line = dump([Sample("Prob001_one", 0, "c", None)])
    path.write_text(line)
    (tmp_path / "samples.meta.json").write_text(damaged)
    assert begin(path, {"t": 1}) == [] and (tmp_path / "samples.1.jsonl").read_text() == line


def test_samples_drawn_otherwise_are_kept_under_another_name_and_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    begin(path, {"temperature": 0.8})
    line = dump([Sample("Prob001_one", 0, "c", None, "p", "stop")])
    path.write_text(line)
    assert begin(path, {"temperature": 0.2}) == []
    assert (tmp_path / "samples.1.jsonl").read_text() == line
    assert json.loads((tmp_path / "samples.1.meta.json").read_text())["made_from"] == {"temperature": 0.8}

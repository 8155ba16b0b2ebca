"""The whole stage: files in, files out, numbers that can be counted by hand."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gemma_ray.errors import DataError, InputError, ToolError
from gemma_ray.evaluation import Grade, GradeTask, evaluate
from gemma_ray.evaluation.config import EvalConfig
from gemma_ray.evaluation.evaluate import read_summary, whole_evaluation

pytestmark = pytest.mark.usefixtures("icarus")
WRONG = "module TopModule(input a, input b, output q);\n  assign q = a ^ b;\nendmodule\n"


def write_samples(path: Path, rows: list[tuple[str, int, str | None]]) -> Path:
    path.write_text("".join(json.dumps({"task_id": t, "sample": s, "code": c}) + "\n" for t, s, c in rows))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_samples_file_is_graded_and_counted(tiny_dataset: Path, tmp_path: Path, solutions: dict[str, str]) -> None:
    one, invert, both = sorted(solutions)
    rows: list[tuple[str, int, str | None]] = [(one, i, solutions[one]) for i in range(5)]
    rows += [(both, i, solutions[both] if i < 2 else WRONG) for i in range(4)] + [(both, 4, None)]
    rows += [(invert, i, "module TopModule(input a, output q)\nendmodule\n") for i in range(5)]
    steps: list[tuple[int, int, str]] = []
    summary = evaluate(
        EvalConfig(),
        tiny_dataset,
        tmp_path / "out",
        samples=write_samples(tmp_path / "given.jsonl", rows),
        progress=lambda done, total, what: steps.append((done, total, what)),
    )
    results = read_lines(tmp_path / "out" / "results.jsonl")
    assert [(r["task_id"], r["sample"]) for r in results] == [(t, s) for t, s, _ in rows]
    assert all(set(r) == {"task_id", "sample", "verdict", "letter", "detail"} for r in results)
    assert [r["letter"] for r in results] == ["."] * 5 + [".", ".", "R", "R", ""] + ["S"] * 5
    document = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert document == json.loads(json.dumps(summary.to_json()))
    assert (document["problems"], document["samples_per_problem"], document["samples"]) == (3, 5, 15)
    assert document["pass@1"]["value"] == pytest.approx((1 + 2 / 5 + 0) / 3)
    assert document["pass@5"]["value"] == pytest.approx((1 + 1 + 0) / 3)
    low, high = document["pass@1"]["ci95"]
    assert 0 <= low < document["pass@1"]["value"] < high <= 1
    assert document["verdicts"] == {"pass": 7, "syntax_error": 5, "mismatch": 2, "no_code": 1}
    assert document["simulator"].startswith("Icarus Verilog version") and document["sandbox"] in ("bubblewrap", "none")
    assert document["set_aside"] == [] and document["harness_errors"] == 0 and summary.harness_errors == 0
    assert steps[-1] == (5, 5, "programs graded")  # equal programs of a problem are graded once
    assert (3, 3, "references graded") in steps
    assert len(read_lines(tmp_path / "out" / "samples.jsonl")) == 15


def test_too_few_samples_leave_pass_at_5_out(tiny_dataset: Path, tmp_path: Path, solutions: dict[str, str]) -> None:
    given = write_samples(tmp_path / "given.jsonl", [(t, i, c) for t, c in solutions.items() for i in range(2)])
    document = evaluate(EvalConfig(), tiny_dataset, tmp_path / "out", samples=given).to_json()
    assert document["pass@5"] is None and document["pass@1"]["value"] == 1.0 and document["pass@1"]["ci95"][1] == 1.0


def test_problems_that_cannot_pass_count_and_are_listed_with_the_reason(
    tiny_dataset: Path, tmp_path: Path, solutions: dict[str, str]
) -> None:
    bench = tiny_dataset / "Prob002_not_test.sv"
    bench.write_text(bench.read_text().replace(".q(q_ref)", ".q_typo(q_ref)"))
    given = write_samples(tmp_path / "given.jsonl", [(t, 0, c) for t, c in solutions.items()])
    summary = evaluate(EvalConfig(), tiny_dataset, tmp_path / "out", samples=given)
    assert [s["task_id"] for s in summary.set_aside] == ["Prob002_not"]
    assert "compile_error (C)" in summary.set_aside[0]["reason"] and "q_typo" in summary.set_aside[0]["reason"]
    found = summary.pass_at[1]
    assert summary.problems == 3 and found is not None and found.value == pytest.approx(2 / 3)


def test_problems_without_samples_are_listed_and_not_counted(tiny_dataset: Path, tmp_path: Path, solutions: dict[str, str]) -> None:
    given = write_samples(tmp_path / "given.jsonl", [("Prob001_one", 0, solutions["Prob001_one"])])
    summary = evaluate(EvalConfig(), tiny_dataset, tmp_path / "out", samples=given)
    assert summary.problems == 1 and summary.problems_without_samples == ["Prob002_not", "Prob003_and"]
    limited = write_samples(tmp_path / "limited.jsonl", [(t, 0, c) for t, c in solutions.items()])
    assert evaluate(EvalConfig(limit=2), tiny_dataset, tmp_path / "out", samples=limited).problems == 2
    with pytest.raises(DataError, match="no problem 'Prob009'"):
        evaluate(EvalConfig(), tiny_dataset, tmp_path / "out", samples=write_samples(tmp_path / "w.jsonl", [("Prob009", 0, "x")]))


def test_an_endpoint_is_sampled_then_graded_and_a_second_call_asks_nothing(
    tiny_dataset: Path, tmp_path: Path, solutions: dict[str, str], stand_in: Any, completion: Any
) -> None:
    prompts = {(tiny_dataset / f"{t}_prompt.txt").read_text(): code for t, code in solutions.items()}

    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        good = f"```verilog\n{prompts[body['messages'][-1]['content']]}```"
        return 200, completion(*[good if i % 2 == 0 else "I do not know." for i in range(body["n"])])

    server = stand_in(reply)
    config = EvalConfig(n=5)
    first = evaluate(config, tiny_dataset, tmp_path / "out", url=server.url, model=None)
    assert first.model == "tiny" and first.verdicts == {"pass": 9, "no_code": 6}
    found = first.pass_at[1]
    assert found is not None and found.value == pytest.approx(0.6)
    written = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert evaluate(config, tiny_dataset, tmp_path / "out", url=server.url, model="tiny") == first
    assert len(server.requests) == 3 and {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == written
    evaluate(config, tiny_dataset, tmp_path / "out", url=server.url, model="tiny", made_from="another checkpoint")
    assert len(server.requests) == 6
    # Its own samples file, graded alone, gives the same.
    again = evaluate(config, tiny_dataset, tmp_path / "again", samples=tmp_path / "out" / "samples.jsonl")
    assert again.verdicts == first.verdicts and again.pass_at == first.pass_at


def test_grading_a_file_keeps_samples_that_were_drawn_before(
    tiny_dataset: Path, tmp_path: Path, solutions: dict[str, str], stand_in: Any, completion: Any
) -> None:
    server = stand_in(lambda body, n: (200, completion("nothing")))
    evaluate(EvalConfig(n=1), tiny_dataset, tmp_path / "out", url=server.url)
    drawn = (tmp_path / "out" / "samples.jsonl").read_text()
    given = write_samples(tmp_path / "given.jsonl", [("Prob001_one", 0, solutions["Prob001_one"])])
    evaluate(EvalConfig(n=1), tiny_dataset, tmp_path / "out", samples=given)
    assert (tmp_path / "out" / "samples.1.jsonl").read_text() == drawn
    assert len(read_lines(tmp_path / "out" / "samples.jsonl")) == 1


def test_a_refusal_is_the_detail_of_its_samples(
    tiny_dataset: Path, tmp_path: Path, solutions: dict[str, str], stand_in: Any, completion: Any
) -> None:
    prompt = (tiny_dataset / "Prob001_one_prompt.txt").read_text()
    server = stand_in(
        lambda body, n: (
            (400, {"message": "the context is 64 tokens long"}) if body["messages"][-1]["content"] == prompt else (200, completion("no"))
        )
    )
    summary = evaluate(EvalConfig(n=1), tiny_dataset, tmp_path / "out", url=server.url)
    first = read_lines(tmp_path / "out" / "results.jsonl")[0]
    assert first["verdict"] == "no_code" and "the context is 64 tokens long" in first["detail"]
    assert summary.refused == 1 and summary.problems == 3


def test_grading_can_run_elsewhere_in_any_order(tiny_dataset: Path, tmp_path: Path, solutions: dict[str, str]) -> None:
    def elsewhere(function: Callable[[GradeTask], Grade], items: Sequence[GradeTask]) -> Iterator[Grade]:
        sent = pickle.dumps((function, list(items)))
        function, arrived = pickle.loads(sent)
        for item in reversed(arrived):
            yield pickle.loads(pickle.dumps(function(item)))

    given = write_samples(tmp_path / "given.jsonl", [(t, i, c) for t, c in solutions.items() for i in range(2)])
    here = evaluate(EvalConfig(), tiny_dataset, tmp_path / "here", samples=given)
    there = evaluate(EvalConfig(), tiny_dataset, tmp_path / "there", samples=given, grade_map=elsewhere)
    assert here == there
    assert (tmp_path / "here" / "results.jsonl").read_bytes() == (tmp_path / "there" / "results.jsonl").read_bytes()


def test_a_missing_simulator_is_found_before_anything_is_sampled(
    tiny_dataset: Path, tmp_path: Path, stand_in: Any, completion: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = stand_in(lambda body, n: (200, completion("x")))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolError, match="apt-get install iverilog"):
        evaluate(EvalConfig(), tiny_dataset, tmp_path / "out", url=server.url)
    assert server.requests == []


def test_harness_errors_elsewhere_are_counted_and_explained(
    tiny_dataset: Path, tmp_path: Path, solutions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_bare_host(function: Callable[[GradeTask], Grade], items: Sequence[GradeTask]) -> Iterator[Grade]:
        with monkeypatch.context() as patch:
            patch.setenv("PATH", str(tmp_path))
            yield from [function(item) for item in items]

    given = write_samples(tmp_path / "given.jsonl", [("Prob001_one", 0, solutions["Prob001_one"])])
    summary = evaluate(EvalConfig(), tiny_dataset, tmp_path / "out", samples=given, grade_map=on_a_bare_host)
    assert summary.harness_errors > 0 and summary.harness_error and "iverilog" in summary.harness_error
    assert summary.verdicts == {"harness_error": 1} and summary.letters == {}
    found = summary.pass_at[1]
    assert found is not None and found.value == 0.0


def test_neither_an_endpoint_nor_a_file_is_an_error(tiny_dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="URL or a samples file"):
        evaluate(EvalConfig(), tiny_dataset, tmp_path / "out")


@pytest.fixture
def finished(tiny_dataset: Path, tmp_path: Path, solutions: dict[str, str]) -> Path:
    given = write_samples(tmp_path / "given.jsonl", [(t, 0, c) for t, c in solutions.items()])
    evaluate(EvalConfig(), tiny_dataset, tmp_path / "out", samples=given)
    return tmp_path / "out"


@pytest.mark.parametrize("damaged", [None, "{", "{}", "[]", "null", "", "[" * 200_000, "9" * 5000, b"\xff"])
def test_a_damaged_summary_is_told_and_no_whole_evaluation(finished: Path, damaged: str | bytes | None) -> None:
    summary = finished / "summary.json"
    assert whole_evaluation(finished) and read_summary(finished) == json.loads(summary.read_text())
    summary.unlink()
    if damaged is not None:
        summary.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    assert not whole_evaluation(finished)
    with pytest.raises(InputError, match=r"summary\.json is missing or damaged; remove it and run the evaluation again"):
        read_summary(finished)


def test_every_key_of_a_summary_is_wanted(finished: Path) -> None:
    document = read_summary(finished)
    for key in document:
        (finished / "summary.json").write_text(json.dumps({k: v for k, v in document.items() if k != key}))
        assert not whole_evaluation(finished), key
    (finished / "summary.json").write_text(json.dumps({**document, "pass@1": 0.5}))
    assert not whole_evaluation(finished)


@pytest.mark.parametrize("name", ["results.jsonl", "samples.jsonl"])
def test_an_evaluation_is_whole_with_all_its_lines(finished: Path, name: str) -> None:
    path = finished / name
    text = path.read_text()
    for damaged in (text[:-20], text + text, "", text.replace("{", "[", 1), "1\n2\n3\n"):
        path.write_text(damaged)
        assert not whole_evaluation(finished)
    path.unlink()
    assert not whole_evaluation(finished)


def test_an_evaluation_that_could_not_grade_all_is_not_whole(finished: Path) -> None:
    (finished / "summary.json").write_text(json.dumps({**read_summary(finished), "harness_errors": 1}))
    assert not whole_evaluation(finished)

"""`workloads.eval`: what is looked at before an endpoint is started, and what counts as done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gemma_ray.errors import DataError, InputError, ToolError
from gemma_ray.evaluation import Grade
from gemma_ray.recipe import Recipe, parse_recipe
from workloads import eval as stage
from workloads.endpoint import TUNED, Target
from workloads.progress import Progress


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs of the endpoints that the stage started; it gets the one that stands first when it does."""
    urls: list[str] = []

    @contextmanager
    def endpoint(*_: Any) -> Iterator[Target]:
        urls.append(urls[0] if urls else "http://127.0.0.1:9")
        yield Target(urls[0], "tiny")

    monkeypatch.setattr(stage, "endpoint", endpoint)
    monkeypatch.setattr(stage, "_weights", lambda *_: "weights")
    return urls


def recipe(folder: Path, dataset: Path, **config: Any) -> Recipe:
    run = {"dir": str(folder / "run"), "cache_dir": str(folder / "cache")}
    return parse_recipe({"run": run, "eval": {"dataset": str(dataset), "n": 1, "retries": 0, **config}})


def test_without_a_simulator_nothing_is_started_or_written(
    tiny_dataset: Path, tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolError, match="apt-get install iverilog"):
        stage.run(recipe(tmp_path, tiny_dataset), Progress())
    assert not started and not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", ["missing", "empty", "last problem", "name too long"])
def test_a_dataset_that_cannot_be_read_is_told_before_anything_starts(
    tiny_dataset: Path, tmp_path: Path, started: list[str], damage: str, icarus: None
) -> None:
    (tmp_path / "empty").mkdir()
    (tiny_dataset / "Prob003_and_ref.sv").unlink()
    folder = {"missing": tmp_path / "nope", "empty": tmp_path / "empty", "name too long": tmp_path / ("x" * 300)}.get(damage, tiny_dataset)
    with pytest.raises(DataError, match=r"no folder|no problems|has no Prob003_and_ref\.sv"):
        stage.run(recipe(tmp_path, folder), Progress())
    assert not started and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options", [{"url": ""}, {"model": "m"}, {"url": "http://127.0.0.1:99999"}, {"url": "http://a", "samples": Path("s")}]
)
def test_options_that_would_be_ignored_are_refused(tiny_dataset: Path, tmp_path: Path, started: list[str], options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"--url|--samples|--model"):
        stage.run(recipe(tmp_path, tiny_dataset), Progress(), **options)
    assert not started and not (tmp_path / "run").exists()


def test_what_could_not_be_graded_is_graded_again_and_not_drawn_again(
    tiny_dataset: Path, tmp_path: Path, started: list[str], stand_in: Any, completion: Any, monkeypatch: pytest.MonkeyPatch, icarus: None
) -> None:
    server = stand_in(lambda body, n: (200, completion("module TopModule(output q);\nassign q = 1;\nendmodule\n")))
    started.append(server.url)
    run = recipe(tmp_path, tiny_dataset)

    def broken(_: Any, tasks: Any) -> list[Grade]:
        return [Grade(t.problem.task_id, t.sample, "harness_error", "", "no simulator there") for t in tasks]

    with monkeypatch.context() as patch:
        patch.setattr(stage, "_grade_map", lambda: broken)
        assert stage.run(run, Progress())["harness_errors"] > 0
    assert stage.pending(run, Progress(), TUNED)
    summary = stage.run(run, Progress())
    assert summary["harness_errors"] == 0 and summary["verdicts"]["pass"] == 1
    assert len(server.requests) == 3 and not stage.pending(run, Progress(), TUNED)
    monkeypatch.setattr(stage, "endpoint", None)
    assert stage.run(run, Progress()) == summary

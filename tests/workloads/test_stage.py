"""What stages share: skipping and making again, one process a stage, what goes into RUN/recipe.yaml, folders that cannot be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma_ray.artifacts import read_json
from gemma_ray.errors import RecipeError, ResourceError
from gemma_ray.recipe import Recipe, load_recipe, parse_recipe
from workloads.progress import Progress
from workloads.stage import check_folders, once, timed


def recipe(folder: Path, **sections: Any) -> Recipe:
    return parse_recipe({"run": {"dir": str(folder), "cache_dir": str(folder / "cache")}, **sections})


def counted(calls: list[int], artifact: Path, content: str = "whole") -> Any:
    def work() -> None:
        calls.append(1)
        artifact.write_text(content)

    return work


def test_a_stage_is_skipped_when_done_and_made_again_when_damaged(tmp_path: Path) -> None:
    calls: list[int] = []
    run, artifact = recipe(tmp_path), tmp_path / "verify.json"
    for _ in range(2):
        once(run, "verify", "inputs", artifact, counted(calls, artifact), Progress())
    assert len(calls) == 1
    artifact.write_text("who")
    once(run, "verify", "inputs", artifact, counted(calls, artifact), Progress())
    assert (len(calls), artifact.read_text()) == (2, "whole")
    artifact.unlink()
    once(run, "verify", "inputs", artifact, counted(calls, artifact), Progress())
    once(run, "verify", "other inputs", artifact, counted(calls, artifact), Progress())
    assert len(calls) == 4


def test_work_outside_the_record_makes_the_stage_undone(tmp_path: Path) -> None:
    """Grading a file of samples writes the same folder as evaluating the run's own model."""
    calls: list[int] = []
    run, artifact = recipe(tmp_path), tmp_path / "summary.json"
    once(run, "eval", "own model", artifact, counted(calls, artifact, "own"), Progress())
    with timed(run, "eval", Progress()):
        artifact.write_text("oth")  # of the same length
    once(run, "eval", "own model", artifact, counted(calls, artifact, "own"), Progress())
    assert (len(calls), artifact.read_text()) == (2, "own")


def test_interrupted_work_leaves_no_record_of_the_earlier_one(tmp_path: Path) -> None:
    calls: list[int] = []
    run, artifact = recipe(tmp_path), tmp_path / "a"
    once(run, "eval", "A", artifact, counted(calls, artifact), Progress())

    def killed() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        once(run, "eval", "B", artifact, killed, Progress())
    once(run, "eval", "A", artifact, counted(calls, artifact), Progress())
    assert len(calls) == 2


def test_two_processes_are_not_at_the_same_stage(tmp_path: Path) -> None:
    with (
        timed(recipe(tmp_path), "train", Progress()),
        pytest.raises(ResourceError, match="another process is at 'train'"),
        timed(recipe(tmp_path), "train", Progress()),
    ):
        pass
    with timed(recipe(tmp_path), "train", Progress()), timed(recipe(tmp_path), "base model", Progress()):
        pass


def test_the_recipe_of_a_run_keeps_what_it_was_trained_with(tmp_path: Path) -> None:
    with timed(recipe(tmp_path, train={"steps": 6}, lora={"rank": 4}), "train", Progress()):
        pass
    other = recipe(tmp_path, train={"steps": 99}, lora={"rank": 77}, eval={"n": 3})
    with pytest.raises(ZeroDivisionError), timed(other, "eval", Progress()):
        raise ZeroDivisionError
    assert load_recipe(str(tmp_path / "recipe.yaml")).eval.n != 3
    with timed(other, "eval", Progress()):
        pass
    kept = load_recipe(str(tmp_path / "recipe.yaml"))
    assert (kept.train.steps, kept.lora.rank, kept.eval.n) == (6, 4, 3)


@pytest.mark.parametrize("content", ["{", "[]", '{"stages": {"train": "soon"}}'])
def test_damaged_times_cost_no_work(tmp_path: Path, content: str) -> None:
    (tmp_path / "timings.json").write_text(content)
    with timed(recipe(tmp_path), "eval", Progress()):
        pass
    assert list(read_json(tmp_path / "timings.json")["stages"]) == ["eval"]


@pytest.mark.parametrize("key", ["dir", "cache_dir"])
@pytest.mark.parametrize("place", ["file", "file/inside", "/proc/none", "x" * 300])
def test_folders_that_cannot_be_written_are_refused_and_nothing_is_left(tmp_path: Path, key: str, place: str) -> None:
    (tmp_path / "file").write_text("")
    folders = {"dir": str(tmp_path / "run"), "cache_dir": str(tmp_path / "cache"), key: str(tmp_path / place)}
    with pytest.raises(ResourceError, match=f"run.{key} = .*cannot be written"):
        check_folders(parse_recipe({"run": folders}))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("folder", ["", "  ", "a\0b", "~no-such-user-here/x"])
def test_what_is_no_folder_name_is_refused_in_the_recipe(folder: str) -> None:
    with pytest.raises(RecipeError, match=r"run\.dir"):
        parse_recipe({"run": {"dir": folder}})


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Recipe().run.cache_path == tmp_path / "gemma-ray"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert Recipe().run.cache_path == Path.home() / ".cache" / "gemma-ray"

"""Artifacts are whole or absent, whatever stops the process that writes them."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gemma_ray.artifacts import (
    RunPaths,
    alone,
    file_sha256,
    fingerprint,
    forget_stage,
    mark_stage_done,
    read_json,
    stage_done,
    whole_folder,
    write_json,
    write_text,
)


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def run_until_killed(code: str, *arguments: object) -> None:
    """Run code in another process until it prints `ready`, then SIGKILL it."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        process.kill()
    assert process.returncode == -signal.SIGKILL


HALF_A_FOLDER = """
import sys, time
from pathlib import Path
from gemma_ray.artifacts import whole_folder
with whole_folder(Path(sys.argv[1])) as folder:
    (folder / "first").write_text("new")
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_folder_appears_only_when_its_block_ends(tmp_path: Path):
    target = tmp_path / "run" / "data"
    with whole_folder(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    assert entries(tmp_path / "run") == {"data"}
    assert (target / "a").read_text() == "1"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_nothing_behind(tmp_path: Path, error: type[BaseException]):
    with pytest.raises(error), whole_folder(tmp_path / "data") as folder:
        (folder / "a").write_text("1")
        raise error
    assert entries(tmp_path) == set()


def test_an_error_leaves_the_old_folder_as_it_was(tmp_path: Path):
    target = tmp_path / "data"
    target.mkdir()
    (target / "a").write_text("old")
    with pytest.raises(ValueError), whole_folder(target) as folder:
        (folder / "a").write_text("new")
        raise ValueError
    assert entries(tmp_path) == {"data"}
    assert (target / "a").read_text() == "old"


def test_a_folder_is_replaced_whole(tmp_path: Path):
    target = tmp_path / "data"
    target.mkdir()
    (target / "only in the old one").write_text("old")
    with whole_folder(target) as folder:
        (folder / "a").write_text("new")
    assert entries(tmp_path) == {"data"}
    assert entries(target) == {"a"}


def test_a_file_or_a_link_in_the_folders_place_is_replaced(tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("1")
    (tmp_path / "link").symlink_to(elsewhere)
    (tmp_path / "file").write_text("old")
    for name in ("link", "file"):
        with whole_folder(tmp_path / name) as folder:
            (folder / "a").write_text("new")
        assert (tmp_path / name).is_dir() and not (tmp_path / name).is_symlink()
    assert entries(tmp_path) == {"elsewhere", "link", "file"}
    assert entries(elsewhere) == {"kept"}


def test_a_kill_leaves_no_half_folder_and_the_next_start_removes_its_leftovers(tmp_path: Path):
    target = tmp_path / "data"
    run_until_killed(HALF_A_FOLDER, target)
    assert not target.exists()
    assert len(entries(tmp_path)) == 1
    with whole_folder(target) as folder:
        (folder / "a").write_text("1")
    assert entries(tmp_path) == {"data"}


def test_a_kill_leaves_the_old_folder_as_it_was(tmp_path: Path):
    target = tmp_path / "data"
    with whole_folder(target) as folder:
        (folder / "first").write_text("old")
    run_until_killed(HALF_A_FOLDER, target)
    assert entries(target) == {"first"}
    assert (target / "first").read_text() == "old"


def test_another_living_process_keeps_its_temporary_folder(tmp_path: Path):
    target = tmp_path / "data"
    command = [sys.executable, "-c", HALF_A_FOLDER, str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        others = entries(tmp_path)
        with whole_folder(target):
            pass
        process.kill()
    assert entries(tmp_path) == others | {"data"}


def test_leftovers_of_a_longer_name_are_another_artifacts(tmp_path: Path):
    run_until_killed(HALF_A_FOLDER, tmp_path / "eval.old")
    leftovers = entries(tmp_path)
    with whole_folder(tmp_path / "eval"):
        pass
    assert entries(tmp_path) == leftovers | {"eval"}


def test_a_file_is_replaced_whole(tmp_path: Path):
    path = tmp_path / "new" / "plan.json"
    write_text(path, "old, and longer")
    write_text(path, "ünïcode")
    assert path.read_bytes() == "ünïcode".encode()
    assert entries(path.parent) == {"plan.json"}


def test_text_that_cannot_be_written_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "plan.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half of it is fine, then a lone surrogate \ud800")
    assert path.read_text() == "old"
    assert entries(tmp_path) == {"plan.json"}


def test_a_reader_never_sees_half_a_file(tmp_path: Path):
    path, texts = tmp_path / "metrics", ["a" * 200_000, "b" * 300_000]
    write_text(path, texts[0])
    stop = threading.Event()

    def keep_writing() -> None:
        while not stop.is_set():
            for text in texts:
                write_text(path, text)

    writers = [threading.Thread(target=keep_writing) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        seen = {path.read_text() for _ in range(200)}
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert seen <= set(texts)


def test_a_kill_while_writing_leaves_one_of_the_whole_files(tmp_path: Path):
    path = tmp_path / "metrics.json"
    code = """
import sys
from pathlib import Path
from gemma_ray.artifacts import write_json
path = Path(sys.argv[1])
write_json(path, [0] * 200_000)
print("ready", flush=True)
n = 0
while True:
    n += 1
    write_json(path, [n] * 200_000)
"""
    run_until_killed(code, path)
    value = read_json(path)
    assert len(value) == 200_000 and len(set(value)) == 1


def test_json_keeps_its_value(tmp_path: Path):
    value = {"pass@1": 0.641, "names": ["é"], "none": None}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value


def test_a_stage_is_done_for_the_same_inputs_while_its_artifact_is_whole(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    artifact = tmp_path / "model"
    (artifact / "inner").mkdir(parents=True)
    (artifact / "inner" / "a.bin").write_bytes(b"12345")
    assert not stage_done(paths, "convert", {"steps": 10}, artifact)
    mark_stage_done(paths, "convert", {"steps": 10}, artifact)
    assert stage_done(paths, "convert", {"steps": 10}, artifact)
    assert not stage_done(paths, "convert", {"steps": 11}, artifact)
    assert not stage_done(paths, "train", {"steps": 10}, artifact)
    (artifact / "inner" / "a.bin").write_bytes(b"1234")  # cut short
    assert not stage_done(paths, "convert", {"steps": 10}, artifact)
    (artifact / "inner" / "a.bin").unlink()
    assert not stage_done(paths, "convert", {"steps": 10}, artifact)


def test_a_forgotten_or_damaged_record_counts_as_not_done(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    artifact = tmp_path / "verify.json"
    artifact.write_text("{}")
    mark_stage_done(paths, "verify", 1, artifact)
    (paths.stages / "verify.json").write_text("{")
    assert not stage_done(paths, "verify", 1, artifact)
    mark_stage_done(paths, "verify", 1, artifact)
    forget_stage(paths, "verify")
    forget_stage(paths, "verify")
    assert not stage_done(paths, "verify", 1, artifact)


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    with alone(tmp_path / "new" / "lock"), pytest.raises(BlockingIOError), alone(tmp_path / "new" / "lock"):
        pass
    with alone(tmp_path / "new" / "lock"):
        pass


def test_a_fingerprint_follows_values_and_not_their_order():
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert len({fingerprint(v) for v in ({"a": 1}, {"a": "1"}, {"a": [1]}, {"b": 1}, [1, 2], [2, 1])}) == 6


def test_a_files_sha256_is_hashlibs(tmp_path: Path):
    data = os.urandom((1 << 20) + 17)
    (tmp_path / "weights").write_bytes(data)
    assert file_sha256(tmp_path / "weights") == hashlib.sha256(data).hexdigest()


def test_every_artifact_is_inside_its_run(tmp_path: Path):
    paths = RunPaths(tmp_path)
    names = [name for name, member in vars(RunPaths).items() if isinstance(member, property)]
    places = [getattr(paths, name) for name in names]
    assert len(set(places)) == len(names) > 10
    assert all(place.is_relative_to(tmp_path) for place in places)

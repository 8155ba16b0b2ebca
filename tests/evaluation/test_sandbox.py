"""What a program can and cannot do in the sandbox."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gemma_ray.evaluation.sandbox import Limits, SandboxError, SandboxKind, run_limited, sandbox_kind

KINDS: list[SandboxKind] = ["bubblewrap", "none"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> SandboxKind:
    if request.param == "bubblewrap" and sandbox_kind() == "none":
        pytest.skip("bubblewrap does not work on this machine")
    return request.param


def processes_with(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if mark.encode() in words and state != "Z":
                found.append(entry.name)
    return found


def all_gone(mark: str) -> bool:
    """Whether no process has the mark any more; the kernel takes a moment to end what was killed."""
    deadline = time.monotonic() + 10
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not processes_with(mark)


def test_output_is_in_order_and_the_exit_code_is_the_programs(kind: SandboxKind, tmp_path: Path) -> None:
    outcome = run_limited(["sh", "-c", "echo one; echo two >&2; echo three; exit 3"], tmp_path, Limits(5), kind=kind)
    assert (outcome.output, outcome.exit_code, outcome.stopped) == ("one\ntwo\nthree\n", 3, None)


def test_a_signal_is_told_from_an_exit(kind: SandboxKind, tmp_path: Path) -> None:
    assert run_limited(["sh", "-c", "kill -SEGV $$"], tmp_path, Limits(5), kind=kind).exit_code == 128 + 11


def test_a_busy_loop_is_stopped_by_its_processor_limit_and_leaves_nothing(kind: SandboxKind, tmp_path: Path) -> None:
    mark = f"busy-{os.getpid()}-{kind}"
    outcome = run_limited(["sh", "-c", "echo begun; while :; do :; done", mark], tmp_path, Limits(1), kind=kind)
    assert (outcome.output.splitlines()[0], outcome.stopped) == ("begun", "time")
    assert all_gone(mark)


def test_a_sleeper_and_its_children_are_stopped_by_the_clock(kind: SandboxKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limits, "wall_s", 0.5)
    mark = f"sleeper-{os.getpid()}-{kind}"
    outcome = run_limited(["sh", "-c", "sh -c 'sleep 100; :' $0 & echo begun; sleep 100; :", mark], tmp_path, Limits(5), kind=kind)
    assert (outcome.output, outcome.stopped) == ("begun\n", "time")
    assert all_gone(mark)


def test_a_child_left_in_the_background_does_not_outlive_the_run(kind: SandboxKind, tmp_path: Path) -> None:
    mark = f"left-{os.getpid()}-{kind}"
    outcome = run_limited(["sh", "-c", "sh -c 'sleep 100; :' $0 >/dev/null 2>&1 & echo done", mark], tmp_path, Limits(5), kind=kind)
    assert (outcome.output, outcome.stopped) == ("done\n", None)
    assert all_gone(mark)


def test_a_flood_of_output_is_cut(kind: SandboxKind, tmp_path: Path) -> None:
    outcome = run_limited(["sh", "-c", "while :; do echo flood; done"], tmp_path, Limits(20, output_bytes=10_000), kind=kind)
    assert len(outcome.output) == 10_000 and outcome.stopped == "output"


def test_memory_and_file_sizes_are_bounded(kind: SandboxKind, tmp_path: Path) -> None:
    limits = Limits(20, memory_bytes=256 << 20, file_bytes=1 << 20)
    big = run_limited(["python3", "-c", "x = bytearray(1 << 30); print('allocated')"], tmp_path, limits, kind=kind)
    assert "MemoryError" in big.output and big.exit_code == 1
    run_limited(["sh", "-c", "head -c 5000000 /dev/zero > big"], tmp_path, limits, kind=kind)
    assert (tmp_path / "big").stat().st_size == 1 << 20


def test_bubblewrap_lets_nothing_be_written_outside_the_folder(tmp_path: Path) -> None:
    if sandbox_kind() == "none":
        pytest.skip("bubblewrap does not work on this machine")
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    home = Path.home() / f".sandbox-test-{os.getpid()}"
    script = f"echo x > here; echo x > {outside}/there; echo x > {home}; echo x > /tmp/sandbox-test-{os.getpid()}; ls /tmp"
    outcome = run_limited(["sh", "-c", script], inside, Limits(5), kind="bubblewrap")
    assert (inside / "here").exists()
    assert not list(outside.iterdir()) and not home.exists() and not Path(f"/tmp/sandbox-test-{os.getpid()}").exists()
    assert str(home) in outcome.output  # the shell said why


def test_bubblewrap_has_no_network(tmp_path: Path) -> None:
    if sandbox_kind() == "none":
        pytest.skip("bubblewrap does not work on this machine")
    outcome = run_limited(["cat", "/proc/net/dev"], tmp_path, Limits(5), kind="bubblewrap")
    assert [line.split(":")[0].strip() for line in outcome.output.splitlines()[2:]] == ["lo"]


def test_a_program_that_does_not_exist_is_told_from_a_broken_sandbox(kind: SandboxKind, tmp_path: Path) -> None:
    assert run_limited(["no-such-program"], tmp_path, Limits(5), kind=kind).exit_code == 127
    with pytest.raises(SandboxError):
        run_limited(["true"], tmp_path / "missing", Limits(5), kind=kind)

"""Detached servers: who runs, what is stale, how one ends. The servers are small processes, not vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from gemma_ray.artifacts import read_json, write_json
from gemma_ray.cli import app
from gemma_ray.errors import InputError, ResourceError, StageError
from gemma_ray.recipe import load_recipe
from gemma_ray.serving import background
from gemma_ray.serving.application import Endpoint
from workloads import serve
from workloads.progress import Progress

URL = "http://127.0.0.1:8123"


def server(state_file: Path, log_file: Path, body: str = "") -> list[str]:
    """argv of a process that announces itself, starts a child as Ray would, and waits for a signal."""
    code = f"""
        import subprocess, sys
        from pathlib import Path
        from gemma_ray.serving.application import Endpoint
        from gemma_ray.serving.background import announce, run_until_signal
        {body}
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        announce(Path({str(state_file)!r}), Endpoint({URL!r}, ("base", "tuned")), Path({str(log_file)!r}))
        def stop():
            child.kill()
            Path({str(log_file)!r}).with_name("stopped").touch()
        run_until_signal(stop, Path({str(state_file)!r}))
    """
    return [sys.executable, "-c", textwrap.dedent(code)]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    state_file, log_file = tmp_path / "serve.json", tmp_path / "serve.log"
    yield state_file, log_file
    background.stop(state_file, grace_s=5)


def test_a_server_starts_detached_and_stops_cleanly(files: tuple[Path, Path]):
    state_file, log_file = files
    started = background.start_detached(server(*files), state_file, log_file, ready_timeout_s=60)
    assert (started.url, started.models, started.log) == (URL, ("base", "tuned"), str(log_file))
    assert os.getsid(started.pid) == started.pid != os.getsid(0), "it must survive the terminal"
    assert background.running(state_file) == started

    family = [psutil.Process(started.pid), *psutil.Process(started.pid).children(recursive=True)]
    assert len(family) == 2
    assert background.stop(state_file) == started
    assert not [process for process in family if process.is_running()]
    assert (log_file.parent / "stopped").exists()
    assert not state_file.exists()
    assert background.stop(state_file) is None


def test_a_second_start_names_the_first(files: tuple[Path, Path]):
    started = background.start_detached(server(*files), *files, ready_timeout_s=60)
    with pytest.raises(ResourceError, match=f"{URL}.*pid {started.pid}"):
        background.start_detached(server(*files), *files, ready_timeout_s=60)
    assert background.running(files[0]) == started


def test_a_server_that_fails_says_its_last_words(files: tuple[Path, Path]):
    argv = server(*files, body="sys.exit('port 8000 is in use')")
    with pytest.raises(StageError, match=r"exit code 1: port 8000 is in use \(log: ") as failure:
        background.start_detached(argv, *files, ready_timeout_s=60)
    assert str(files[1]) in str(failure.value)
    assert background.running(files[0]) is None


def test_a_server_whose_input_was_wrong_is_an_input_error_in_its_own_words(files: tuple[Path, Path]):
    words = "serving needs 932.9 GiB of memory; lower serve.min_replicas"
    argv = server(*files, body=f"print('error: {words}', file=sys.stderr); print('a late note'); sys.exit(2)")
    with pytest.raises(InputError) as failure:
        background.start_detached(argv, *files, ready_timeout_s=60)
    assert str(failure.value) == f"{words} (log: {files[1]})"


def test_a_server_does_not_take_the_place_of_another(files: tuple[Path, Path]):
    started = background.start_detached(server(*files), *files, ready_timeout_s=60)
    with pytest.raises(ResourceError, match=rf"{URL} \(pid {started.pid}\); `gemma-ray serve .*recipe.yaml --stop`"):
        background.announce(files[0], started.endpoint, files[1])
    background.withdraw(files[0])
    assert background.running(files[0]) == started, "the first server's file must stay"


def test_a_run_that_is_served_is_not_served_again(tmp_path: Path):
    recipe = load_recipe("quickstart-cpu", [f"run.dir={tmp_path}"])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    born = psutil.Process(other.pid).create_time()
    state = {"pid": other.pid, "started_s": born, "url": URL, "models": ["base"], "log": "x"}
    write_json(tmp_path / "serve.json", state)
    try:
        with pytest.raises(ResourceError, match=f"{URL}.*--stop` ends it"):
            serve.run(recipe, Progress())
        assert read_json(tmp_path / "serve.json") == state
        assert not (tmp_path / "recipe.yaml").exists()
    finally:
        other.kill()
        other.wait()


def test_the_command_that_ends_a_server_has_the_overrides_that_started_it():
    command = serve.stop_command("c.yaml", ["run.dir=my runs/a", "serve.port=8311"])
    assert command == "gemma-ray serve c.yaml --set 'run.dir=my runs/a' --set serve.port=8311 --stop"


def test_serve_in_json_prints_one_document_once_ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    @contextlib.contextmanager
    def no_cluster(recipe: object):
        yield

    monkeypatch.setattr(serve, "served_models", lambda *a: [])
    monkeypatch.setattr(serve, "cluster", no_cluster)
    monkeypatch.setattr(serve, "serve_models", lambda *a: Endpoint(URL, ("base",)))
    monkeypatch.setattr(background, "run_until_signal", lambda *a: None)
    result = CliRunner().invoke(app, ["serve", "quickstart-cpu", "--set", f"run.dir={tmp_path}", "--json"])
    assert json.loads(result.stdout) == {"url": URL, "models": ["base"]}


def test_a_server_that_is_never_ready_is_ended(files: tuple[Path, Path]):
    argv = server(*files, body="import time; print('asleep', flush=True); time.sleep(600)")
    with pytest.raises(StageError, match="not ready after 3 s"):
        background.start_detached(argv, *files, ready_timeout_s=3)
    assert not [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def test_a_server_that_does_not_stop_is_killed_with_its_children(files: tuple[Path, Path]):
    argv = server(*files, body="import time; import gemma_ray.serving.background as b; run_until_signal = lambda *a: _deaf()")
    argv[-1] = "import signal\ndef _deaf():\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    while True: time.sleep(1)\n" + argv[-1]
    started = background.start_detached(argv, *files, ready_timeout_s=60)
    family = [psutil.Process(started.pid), *psutil.Process(started.pid).children(recursive=True)]
    time.sleep(0.5)  # it announces itself just before it goes deaf
    background.stop(files[0], grace_s=0.5)
    psutil.wait_procs(family, timeout=10)
    assert not [process for process in family if process.is_running()]


@pytest.mark.parametrize("reborn", [True, False])
def test_a_file_left_by_a_dead_server_is_not_a_server(tmp_path: Path, reborn: bool):
    """`reborn`: another process has the pid now."""
    state_file = tmp_path / "serve.json"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    pid, started_s = (os.getpid(), psutil.Process().create_time() - 3600) if reborn else (dead.pid, 1.0)
    write_json(state_file, {"pid": pid, "started_s": started_s, "url": URL, "models": ["base"], "log": "x"})
    assert background.running(state_file) is None
    assert not state_file.exists()


def test_a_damaged_file_is_not_a_server(tmp_path: Path):
    state_file = tmp_path / "serve.json"
    state_file.write_text("{")
    assert background.stop(state_file) is None
    assert not state_file.exists()


def test_ctrl_c_stops_a_server_in_the_foreground(files: tuple[Path, Path]):
    state_file, log_file = files
    process = subprocess.Popen(server(*files))
    while not state_file.exists():
        assert process.poll() is None
        time.sleep(0.05)
    assert read_json(state_file)["pid"] == process.pid
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0
    assert (log_file.parent / "stopped").exists()
    assert not state_file.exists()

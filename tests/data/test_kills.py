"""Preparation killed at random moments, with all that it started, and begun again: the shards are those of a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gemma_ray.data.shards import read_manifest

SCRIPT = """
import sys
from pathlib import Path
import ray
from gemma_ray.data import files, prepare as module
from gemma_ray.data.config import DataConfig
source, model, out = sys.argv[1:]
module.chunks = lambda found: files.chunks(found, 20_000)
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=40)
print("ready", flush=True)
module.prepare(DataConfig(max_seq_len=256, rows_per_shard=100), files.source_files(source), Path(model), Path(out))
print("done", flush=True)
"""
KILLS = 20


def record(i: int) -> dict[str, str]:
    code = f"```verilog\nmodule m{i};\n  wire [{i % 90}:0] w{i % 7};\nendmodule\n```"
    return {"prompt": f"Make number {i} of {i * i}, {i % 11} wide.", "response": f"<answer>{code}</answer>"}


def start(source: Path, model: Path, out: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(source), str(model), str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )


def kill_tree(process: subprocess.Popen[str]) -> None:
    everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in everyone:
        one.kill()
    psutil.wait_procs(everyone[1:], timeout=30)
    process.wait()


@pytest.mark.slow
def test_shards_are_the_same_after_twenty_kills(tiny_gemma: Path, tmp_path: Path) -> None:
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps(record(i)) + "\n" for i in range(3000)))
    whole = start(source, tiny_gemma, tmp_path / "whole")
    assert whole.stdout is not None
    whole.stdout.readline()
    began = time.monotonic()
    whole.stdout.readline()
    took = time.monotonic() - began
    assert whole.wait() == 0
    random_moment = random.Random(0)
    kept: set[str] = set()
    for _ in range(KILLS):
        process = start(source, tiny_gemma, tmp_path / "out")
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(random_moment.uniform(0, took))
        kill_tree(process)
        now = {path.name for work in tmp_path.glob(".out.*.work") for path in work.glob("chunk-*.arrow")}
        assert kept <= now or (tmp_path / "out").exists()  # nothing that was finished is lost
        kept = now
        assert not (tmp_path / "out").exists() or read_manifest(tmp_path / "out").shards
    last = start(source, tiny_gemma, tmp_path / "out")
    assert last.wait() == 0
    assert read_manifest(tmp_path / "out") == read_manifest(tmp_path / "whole")
    for shard in read_manifest(tmp_path / "whole").shards:
        assert (tmp_path / "out" / shard.file).read_bytes() == (tmp_path / "whole" / shard.file).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source.jsonl", "whole"]

"""A plan's bytes against what lies in memory: planned from shapes for CPU devices, then trained on them by the real loop."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from gemma_ray.data.prepare import prepare_text
from gemma_ray.models.axes import AXES
from gemma_ray.models.gemma4 import read_text_config
from gemma_ray.planning.compile_step import abstract_step, device_bytes
from gemma_ray.planning.job import CompileJob
from gemma_ray.training.config import TARGETS, LoraConfig, MeshConfig, TrainConfig
from gemma_ray.training.loop import TrainJob, train

ROWS, LENGTH = 8, 32


@pytest.fixture(scope="module")
def data(short_gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "rows"
    prepare_text([f"module m{i} (input [{i}:0] a);\nendmodule\n" for i in range(60)], short_gemma, LENGTH, folder)
    return folder


def live_bytes(device: Any) -> int:
    """Bytes of every array's shard on a device."""
    gc.collect()
    return device_bytes(array for array in jax.live_arrays() if device in array.sharding.device_set)


@pytest.mark.parametrize(("fsdp", "tp"), [(4, 2), pytest.param(8, 1, marks=pytest.mark.slow)])
def test_planned_bytes_are_live_within_a_tenth(short_gemma: Path, data: Path, tmp_path: Path, fsdp: int, tp: int) -> None:
    """In a process of its own, where no other test's arrays are."""
    command = [sys.executable, __file__, str(fsdp), str(tp), str(short_gemma), str(data), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    print(f"fsdp={fsdp} tp={tp}: {found}")
    assert found["predicted"] == pytest.approx(found["arguments"], rel=0.01)
    assert found["live"][:-1] == pytest.approx([found["predicted"]] * 3, rel=0.1)  # at the last report a checkpoint is on its way


def predict_and_measure(fsdp: int, tp: int, model: Path, data: Path, out: Path) -> dict[str, Any]:
    """Bytes of device 0: planned, of the compiled step's arguments, and live at each report of a run of four steps."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, fsdp, tp), AXES)
    text = read_text_config(model)
    job = CompileJob(text, "cpu", "", fsdp, tp, "float32", "lora", 8, 8.0, TARGETS, ROWS, 1, LENGTH, "none", "dot", clip=False)
    with mesh:
        step, batch, planned = abstract_step(job, mesh)
        arguments = step.lower(batch).compile().memory_analysis().argument_size_in_bytes
    predicted = sum(planned[kind] for kind in ("base_bytes", "adapter_bytes", "optimizer_bytes", "batch_bytes"))
    live: list[int] = []
    run = TrainJob(
        model=model,
        data=data,
        out=out,
        dtype="float32",
        seq_len=LENGTH,
        mesh=MeshConfig(fsdp=fsdp, tp=tp),
        train=TrainConfig.model_validate({"steps": 4, "batch_size": ROWS, "warmup_steps": 1, "checkpoint_every": 100}),
        lora=LoraConfig(rank=8, alpha=8.0),
        made_from={"data": "these inputs"},
    )
    train(run, lambda report: live.append(live_bytes(jax.devices()[0])) if "step" in report else None)
    return {"predicted": predicted, "arguments": arguments, "live": live}


if __name__ == "__main__":
    print(json.dumps(predict_and_measure(int(sys.argv[1]), int(sys.argv[2]), *map(Path, sys.argv[3:6]))))

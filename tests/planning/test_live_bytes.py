"""A plan's bytes against what lies in memory: planned from shapes for CPU devices, then trained on them by the real loop."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from gemma_ray.data.prepare import prepare_text
from gemma_ray.models.gemma4 import read_text_config
from gemma_ray.planning.compile_step import abstract_step, device_bytes
from gemma_ray.planning.job import CompileJob
from gemma_ray.training.config import TARGETS, LoraConfig, MeshConfig, TrainConfig
from gemma_ray.training.loop import TrainJob, train

ROWS, LENGTH = 8, 32


@pytest.fixture(scope="module")
def data(tiny_gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "rows"
    prepare_text([f"module m{i} (input [{i}:0] a);\nendmodule\n" for i in range(60)], tiny_gemma, LENGTH, folder)
    return folder


def live_bytes(device: Any) -> int:
    """Bytes of every array's shard on a device."""
    gc.collect()
    return device_bytes(array for array in jax.live_arrays() if device in array.sharding.device_set)


@pytest.mark.parametrize(("fsdp", "tp"), [(4, 2), (8, 1)])
def test_planned_bytes_are_live_within_a_tenth(tiny_gemma: Path, data: Path, tmp_path: Path, fsdp: int, tp: int) -> None:
    text = read_text_config(tiny_gemma)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(fsdp, tp), ("fsdp", "tp"))
    job = CompileJob(text, "cpu", "", fsdp, tp, "float32", "lora", 8, 8.0, TARGETS, ROWS, 1, LENGTH, "none", "dot", clip=False)
    with mesh:
        step, batch, planned = abstract_step(job, mesh)
        arguments = step.lower(batch).compile().memory_analysis().argument_size_in_bytes
    predicted = sum(planned[kind] for kind in ("base_bytes", "adapter_bytes", "optimizer_bytes", "batch_bytes"))
    assert predicted == pytest.approx(arguments, rel=0.01)

    device = jax.devices()[0]
    before, found = live_bytes(device), []
    settings = TrainConfig.model_validate({"steps": 4, "batch_size": ROWS, "warmup_steps": 1, "checkpoint_every": 100})
    run = TrainJob(
        model=tiny_gemma,
        data=data,
        checkpoints=tmp_path / "checkpoints",
        metrics=tmp_path / "metrics.jsonl",
        dtype="float32",
        seq_len=LENGTH,
        mesh=MeshConfig(fsdp=fsdp, tp=tp),
        train=settings,
        lora=LoraConfig(rank=8, alpha=8.0),
        made_from="these inputs",
    )
    train(run, lambda _: found.append(live_bytes(device) - before))
    print(f"fsdp={fsdp} tp={tp}: predicted {predicted}, live {found} bytes")
    assert found[:-1] == pytest.approx([predicted] * (settings.steps - 1), rel=0.1)  # the last checkpoint is on its way at the last report

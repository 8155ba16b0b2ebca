"""The PyTorch trainer on two processes over gloo: FSDP2 shards the tiny model as it shards the large one on GPUs."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load_file
from twin_rows import LENGTH, write_rows

from gemma_ray.training.config import LoraConfig, MeshConfig, TrainConfig
from gemma_ray.training.metrics import read_metrics
from gemma_ray.training.torch_job import TorchJob
from gemma_ray.training.torch_model import ADAPTER

STEPS = 4


def job(model: Path, data: Path, out: Path, ranks: int, **settings: Any) -> TorchJob:
    config = TrainConfig.model_validate(
        {"engine": "torch", "steps": STEPS, "batch_size": 8, "learning_rate": 1e-3, "warmup_steps": 1, "checkpoint_every": 2}
        | {"weight_decay": 0.1, "clip_norm": 1.0, **settings}
    )
    lora = LoraConfig(rank=4, alpha=8)
    return TorchJob(model, data, out, "float32", LENGTH, MeshConfig(fsdp=ranks), config, lora, made_from={"data": "these inputs"})


def rank_main(rank: int, folder: Path, jobs: list[TorchJob]) -> None:
    """One of two processes: run the jobs, and write down how the model lay in the first one."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    from gemma_ray.training import torch_twin

    kind: Any = torch_twin.TwinTrainer
    begin = kind.begin

    def noted(trainer: Any) -> None:
        begin(trainer)
        whole = sum(p.numel() for p in trainer.model.parameters())
        held = sum(p.to_local().numel() for p in trainer.model.parameters())
        units = sum(type(m).__name__.startswith("FSDP") for m in trainer.model.modules())
        dtypes = sorted({f"{p.dtype} {p.requires_grad}" for p in trainer.model.parameters()})
        place = folder / f"{trainer.job.dtype}-{rank}.json"
        place.write_text(json.dumps({"whole": whole, "held": held, "units": units, "dtypes": dtypes}))

    kind.begin = noted
    for each in jobs:
        torch_twin.train_torch(each, lambda report: None)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(short_gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one`: a run on one process. On two: `two`, `resumed` from the first's checkpoint of step 2, and `bfloat16`."""
    from gemma_ray.training.torch_twin import train_torch

    folder = tmp_path_factory.mktemp("sharded")
    data = write_rows(folder / "data")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train_torch(job(short_gemma, data, folder / "one", 1), lambda report: None)
    torch.set_num_threads(threads)
    (folder / "resumed").mkdir()
    shutil.copytree(folder / "one" / "checkpoints" / "2", folder / "resumed" / "checkpoints" / "2")
    shutil.copyfile(folder / "one" / "metrics.jsonl", folder / "resumed" / "metrics.jsonl")
    jobs = [
        job(short_gemma, data, folder / "two", 2, micro_batches=2, remat="layer"),
        job(short_gemma, data, folder / "resumed", 2, remat="layer"),
        replace(job(short_gemma, data, folder / "bfloat16", 2, remat="layer"), dtype="bfloat16"),
    ]
    torch.multiprocessing.spawn(rank_main, (folder, jobs), nprocs=2)  # type: ignore[attr-defined]
    return folder


def column(runs: Path, name: str, key: str = "loss") -> list[float]:
    return [getattr(m, key) for m in read_metrics(runs / name / "metrics.jsonl")]


@pytest.mark.parametrize("key", ["loss", "grad_norm", "loss_tokens", "learning_rate"])
def test_two_processes_with_micro_batches_train_as_one(runs: Path, key: str) -> None:
    assert len(column(runs, "one", key)) == STEPS
    np.testing.assert_allclose(column(runs, "two", key), column(runs, "one", key), rtol=1e-4)


def test_a_run_goes_on_with_another_number_of_processes(runs: Path) -> None:
    np.testing.assert_allclose(column(runs, "resumed"), column(runs, "one"), rtol=1e-4)
    found, expected = (load_file(runs / name / "checkpoints" / str(STEPS) / ADAPTER) for name in ("resumed", "one"))
    assert found.keys() == expected.keys()
    assert all(np.allclose(found[name], expected[name], atol=1e-4) for name in expected)


def test_each_process_holds_half_of_every_layer(runs: Path) -> None:
    for rank in range(2):
        found = json.loads((runs / f"float32-{rank}.json").read_text())
        assert found["held"] == found["whole"] / 2
        assert found["units"] >= 2 + 2  # each layer, the embedding with the last norm, and the rest


def test_adapters_stay_fp32_beside_bfloat16_weights(runs: Path) -> None:
    assert json.loads((runs / "bfloat16-0.json").read_text())["dtypes"] == ["torch.bfloat16 False", "torch.float32 True"]
    np.testing.assert_allclose(column(runs, "bfloat16"), column(runs, "one"), rtol=0.02)
    saved = load_file(runs / "bfloat16" / "checkpoints" / str(STEPS) / ADAPTER)
    assert {tensor.dtype for tensor in saved.values()} == {np.dtype("float32")}

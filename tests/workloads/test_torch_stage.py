"""`train.engine=torch` as stages: preflight's words, and on two CPU processes from a recipe to the merged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma_ray.errors import CheckpointError, RecipeError
from gemma_ray.recipe import Recipe, load_recipe, parse_recipe
from gemma_ray.training.metrics import read_metrics
from gemma_ray.training.torch_job import check_same_engine
from raycluster.errors import ClusterError
from workloads import convert, train, verify
from workloads.progress import Progress
from workloads.stage import cluster, preflight


def recipe(folder: Path, model: Path, **train_section: Any) -> Recipe:
    return parse_recipe(
        {
            "model": {"source": str(model), "dtype": "float32"},
            "data": {"examples": 40, "heldout_problems": 4, "max_seq_len": 256, "decontaminate": []},
            "lora": {"rank": 4, "alpha": 8},
            "train": {"engine": "torch", "steps": 2, "batch_size": 4, "warmup_steps": 0, "learning_rate": 1e-2, **train_section},
            "mesh": {"fsdp": 2},
            "cluster": {"accelerator": "cpu", "devices_per_host": 2},
            "run": {"dir": str(folder / "run"), "cache_dir": str(folder / "cache")},
        }
    )


def test_the_gpu_recipe_trains_with_torch_on_as_many_processes_as_gpus(tiny_gemma: Path) -> None:
    shipped = load_recipe("gemma4-31b-2xh100", [f"model.source={tiny_gemma}"])
    assert shipped.train.engine == "torch"
    preflight(shipped)
    wider = shipped.model_copy(update={"mesh": shipped.mesh.model_copy(update={"tp": 2, "fsdp": 1})})
    with pytest.raises(RecipeError, match=r"mesh\.tp = 2: .*set mesh\.tp=1 and mesh\.fsdp=2"):
        preflight(wider)


def test_a_tpu_is_refused_before_anything_starts(tiny_gemma: Path) -> None:
    with pytest.raises(ClusterError, match="a PyTorch program runs on GPUs or CPUs"):
        preflight(load_recipe("gemma4-31b-v5p8", ["train.engine=torch", f"model.source={tiny_gemma}"]))


def test_the_engine_is_part_of_what_weights_follow_from() -> None:
    assert "engine" not in train.MAY_CHANGE


@pytest.mark.parametrize(("file", "wrote", "engine"), [("_CHECKPOINT_METADATA", "jax", "torch"), ("adapter_config.json", "torch", "jax")])
def test_the_other_engines_checkpoint_is_named(tmp_path: Path, file: str, wrote: str, engine: str) -> None:
    (tmp_path / "6").mkdir()
    (tmp_path / "6" / file).write_text("{}")
    check_same_engine(tmp_path / "6", wrote)
    with pytest.raises(CheckpointError, match=f"6: trained with train.engine={wrote}, and the recipe says {engine}; set another run.dir"):
        check_same_engine(tmp_path / "6", engine)


@pytest.mark.slow
def test_it_trains_on_two_processes_and_converts(tiny_gemma: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = recipe(tmp_path, tiny_gemma)
    with cluster(wanted):
        assert train.run(wanted, Progress()).step == 2
        convert.run(wanted, Progress())
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert metrics[1].loss < metrics[0].loss
    said = capsys.readouterr().err
    assert "starting 2 PyTorch process(es)" in said
    assert "step 2: 41 tensors merged" in said
    with pytest.raises(RecipeError, match="verify compares with Tunix"):
        verify.run(wanted, Progress())

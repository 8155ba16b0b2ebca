"""Which variants a sweep tries, how figures of two depths are continued, what is on the front, and (slow) a real sweep."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from test_plan import FOUND, GIB, JOB

from gemma_ray.artifacts import read_json
from gemma_ray.errors import RecipeError
from gemma_ray.models.gemma4 import text_config
from gemma_ray.planning.hardware import chip
from gemma_ray.planning.job import Compiled, Traffic
from gemma_ray.planning.page import sweep_text
from gemma_ray.planning.sweep import Sweep, Tried, compile_depths, continued, fastest, on_front, overrides_of, variants, with_overrides
from gemma_ray.planning.train import plan_training
from gemma_ray.recipe import load_recipe
from workloads import plan as stage
from workloads.progress import Progress


def test_the_recipes_own_comes_first_and_nothing_that_changes_the_result_is_varied() -> None:
    job = dataclasses.replace(JOB, batch_size=8)
    found = list(variants(job))
    assert found[0] == job
    assert len(found) == len({repr(v) for v in found})
    assert {(v.batch_size, v.length, v.rank) for v in found} == {(8, 4096, 64)}
    assert {(v.fsdp, v.tp) for v in found} == {(1, 4), (2, 2), (4, 1)}
    assert {v.micro_batches for v in found if v.fsdp == 4} == {1, 2}  # 8 rows in parts of a multiple of 4
    assert {v.remat for v in found} == {"none", "norms", "elementwise", "layer"}


def test_overrides_make_the_variant() -> None:
    for variant in variants(dataclasses.replace(JOB, splash_block=256)):
        assert with_overrides(JOB, overrides_of(variant)) == variant


@pytest.mark.parametrize(
    ("preset", "depths"), [("gemma4-31b", (6, 12)), ("gemma4-26b-a4b", (6, 12)), ("gemma4-e4b", None), ("gemma4-tiny", None)]
)
def test_depths_are_whole_periods_of_models_whose_layers_repeat(preset: str, depths: Any) -> None:
    assert compile_depths(text_config(preset)) == depths


def at_depth(layers: int) -> Compiled:
    """Every figure a different straight line in the number of layers."""
    numbers = [field.name for field in dataclasses.fields(Compiled) if isinstance(getattr(FOUND, field.name), int | float)]
    lines = {name: type(getattr(FOUND, name))(100 * i + (i + 1) * layers) for i, name in enumerate(numbers)}
    traffic = (Traffic("all-gather", 4, 3 + 2 * layers, 7 * layers, 5 * layers, layers, layers), Traffic("all-reduce", 4, 1, 8, 9, 0, 9))
    return dataclasses.replace(FOUND, **lines, kernels={"splash": 3 * layers}, traffic=traffic, slowest=())


def test_straight_lines_are_continued() -> None:
    found = continued(at_depth(6), at_depth(12), (6, 12), 60)
    spent = {"compile_s": 0.0, "host_bytes": 0}
    assert dataclasses.replace(found, **spent) == dataclasses.replace(at_depth(60), **spent)
    assert found.compile_s == at_depth(6).compile_s + at_depth(12).compile_s


def tried(tokens_per_s: float, gib: float) -> Tried:
    plan = plan_training(JOB, FOUND, chip("v5p"), 1, None, 0.5)
    used = dataclasses.replace(plan.device_bytes, peak=int(gib * GIB), temporaries=0)
    fits = gib <= 85
    return Tried(
        {"mesh.fsdp": 1, "mesh.tp": 4, "train.remat": f"{gib}", "train.micro_batches": 1},
        dataclasses.replace(plan, predicted_tokens_per_s=tokens_per_s, device_bytes=used, fits=fits),
        None,
    )


def test_the_front_is_what_nothing_beats_in_both_and_what_does_not_fit_is_not_on_it() -> None:
    broken = Tried({**tried(1, 1).overrides}, None, "VMEM")
    found = on_front([tried(5, 30), broken, tried(9, 80), tried(8, 81), tried(7, 60), tried(12, 90), tried(6, 60)])
    speeds = [(t.plan.predicted_tokens_per_s, t.best_for_its_memory) for t in found if t.plan]
    assert speeds == [(12, False), (9, True), (8, False), (7, True), (6, False), (5, True)]
    assert found[-1].plan is None
    best = fastest(found)
    assert best is not None
    assert best.overrides["train.remat"] == "80"
    page = sweep_text(Sweep(tuple(found), 3, (6, 12)))
    assert "continued from 6 and 12 layers" in page
    assert "90.0 too much" in page
    assert "does not compile: VMEM" in page
    assert "--set train.remat=80" in page
    assert "3 variants were left" in page


def test_a_sweep_without_a_tpu_is_refused(tmp_path: Path) -> None:
    recipe = load_recipe("gemma4-31b-2xh100", [f"run.dir={tmp_path / 'run'}"])
    with pytest.raises(RecipeError, match="--sweep: nothing was compiled: h100 is no TPU"):
        stage.sweep(recipe, Progress())


@pytest.mark.slow
def test_a_sweep_stops_when_its_time_is_over_and_says_what_is_left(tmp_path: Path, plan_cache: Path) -> None:
    overrides = [f"run.dir={tmp_path / 'run'}", f"run.cache_dir={plan_cache}", "plan.sweep_limit_s=1e-9"]
    found = stage.sweep(load_recipe("quickstart-cpu", overrides), Progress())
    assert len(found.tried) == 1
    assert found.tried[0].plan is not None
    assert found.left > 0
    assert read_json(tmp_path / "run" / "sweep.json")["left"] == found.left

"""The plan's arithmetic on a compiled step worked by hand, what is refused, and (slow) a real compilation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gemma_ray.artifacts import read_json
from gemma_ray.errors import CompileError, ModelError, RecipeError, ToolError
from gemma_ray.models.gemma4 import text_config
from gemma_ray.planning.hardware import CHIPS, chip
from gemma_ray.planning.job import Compiled, CompileJob, Traffic
from gemma_ray.planning.page import _time, plan_text
from gemma_ray.planning.sizes import splash_flops_per_token
from gemma_ray.planning.train import plan_training
from gemma_ray.recipe import load_recipe
from raycluster.errors import ClusterError
from raycluster.slices import ACCELERATORS
from workloads import plan as stage
from workloads.progress import Progress

B31 = text_config("gemma4-31b")
JOB = CompileJob(
    text=B31,
    accelerator="v5p",
    topology="2x2x1",
    fsdp=1,
    tp=4,
    dtype="bfloat16",
    mode="lora",
    rank=64,
    alpha=64.0,
    targets=("q_proj",),
    batch_size=4,
    micro_batches=1,
    length=4096,
    remat="none",
    attention="auto",
    clip=False,
)
GIB = 2**30
FOUND = Compiled(
    base_bytes=15 * GIB,
    adapter_bytes=GIB,
    optimizer_bytes=2 * GIB,
    batch_bytes=0,
    temporary_bytes=50 * GIB,
    peak_bytes=60 * GIB,
    base_parameters=30_697_345_280,
    trained_parameters=118_000_000,
    flops=4.0e14,
    loop_flops=0.59e14,
    bytes_accessed=2.765e12,
    optimal_s=1.0,
    cycles=2.1e9,
    product_cycles=2.0e9,
    loop_cycles=1.75e8,
    kernels={"splash": 60},
    slowest=(("dot", 1.0),),
    traffic=(Traffic("all-gather", 4, 10, 100, 60 * 10**9, 5, 30 * 10**9),),
    compile_s=100.0,
    host_bytes=7 * GIB,
    versions={"jax": "0.10.2"},
)


def test_the_arithmetic_of_a_plan_by_hand() -> None:
    plan = plan_training(JOB, FOUND, chip("v5p"), steps=1000, usd_per_hour=16.80, efficiency=0.5)
    attention = 4.5 * splash_flops_per_token(B31, 4096) * 16_384 / 4
    assert plan.tokens_per_step == 16_384
    assert (plan.device_bytes.total, plan.fits) == (68 * GIB, True)  # 72 % of 95 GiB
    assert plan.compute_floor_s == pytest.approx((4.59e14 + attention) / 459e12)
    assert (plan.memory_floor_s, plan.interconnect_floor_s) == (pytest.approx(1.0), pytest.approx(0.1))
    assert plan.xla_s == pytest.approx(1.0 + 1.75e8 / 1.75e9)
    step = 2.1e9 / 1.75e9 + attention / (0.5 * 459e12) + 30e9 / 600e9
    assert plan.predicted_step_s == pytest.approx(step)
    assert plan.predicted_tokens_per_s == pytest.approx(16_384 / step)
    assert plan.predicted_cost_usd == pytest.approx(1000 * step / 3600 * 16.80)


def test_a_prediction_is_no_faster_than_a_roofline() -> None:
    moved = dataclasses.replace(FOUND, bytes_accessed=2.765e13)
    assert plan_training(JOB, moved, chip("v5p"), 1, None, 0.5).predicted_step_s == pytest.approx(10.0)


def test_what_exceeds_ninety_percent_does_not_fit() -> None:
    assert not plan_training(JOB, dataclasses.replace(FOUND, temporary_bytes=68 * GIB), chip("v5p"), 1, None, 0.5).fits
    assert not plan_training(JOB, dataclasses.replace(FOUND, peak_bytes=86 * GIB), chip("v5p"), 1, None, 0.5).fits


def test_no_estimate_where_xla_has_none_and_no_cost_without_a_price() -> None:
    plan = plan_training(JOB, dataclasses.replace(FOUND, optimal_s=-3.0), chip("v6e"), 1, None, 0.5)
    assert (plan.xla_s, plan.xla_tokens_per_s, plan.predicted_cost_usd) == (None, None, None)


def test_a_job_and_a_result_survive_json() -> None:
    import json

    assert CompileJob.from_json(json.loads(json.dumps(JOB.to_json()))) == JOB
    assert Compiled.from_json(json.loads(json.dumps(dataclasses.asdict(FOUND)))) == FOUND


def test_every_chip_that_ray_knows_has_figures() -> None:
    assert set(CHIPS) == set(ACCELERATORS) - {"cpu"}


def test_figures_are_overridden_by_name() -> None:
    row = chip("v5p", {"hbm_bandwidth": 2e12})
    assert (row.hbm_bandwidth, row.bf16_flops) == (2e12, 459e12)
    assert "hbm_bandwidth by the recipe" in row.source
    with pytest.raises(RecipeError, match=r"plan.hardware.hbm_bandwith: a chip has no such figure. Did you mean 'hbm_bandwidth'"):
        chip("v5p", {"hbm_bandwith": 1.0})
    with pytest.raises(RecipeError, match="must be above 0"):
        chip("v5p", {"bf16_flops": 0.0})
    for silly in (float("inf"), 1e-300):
        with pytest.raises(RecipeError, match=r"plan\.hardware\.clock_hz = .*: must be above 0, from"):
            chip("v5p", {"clock_hz": silly})
    assert chip("v5p", {"usd_per_hour": 2.0}).price_source == "plan.hardware.usd_per_hour"
    with pytest.raises(RecipeError, match=r"no figures for accelerator 'v5pp'. Did you mean 'v5p'"):
        chip("v5pp")


def recipe(tmp_path: Path, name: str, *overrides: str) -> Any:
    return load_recipe(name, [f"run.dir={tmp_path / 'run'}", *overrides])


def test_v4_is_planned_without_compiling(tmp_path: Path) -> None:
    plan = stage.run(recipe(tmp_path, "gemma4-31b-v5p8", "cluster.accelerator=v4"), Progress())
    assert plan.train is None
    assert "v4's two cores" in str(plan.why_not)


def test_a_gpu_recipe_is_planned_without_compiling(tmp_path: Path) -> None:
    plan = stage.run(recipe(tmp_path, "gemma4-31b-2xh100"), Progress())
    document = read_json(tmp_path / "run" / "plan.json")
    assert plan.train is None
    assert (document["prediction"], document["compiled"]) == (True, False)
    assert "nothing was compiled: h100 is no TPU" in document["why_not"]
    assert "nothing was compiled" in plan_text(plan)


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (("mesh.tp=8", "mesh.fsdp=1", "cluster.topology=2x2x2"), RecipeError, "KV heads of the global layers 4 are not divisible by tp=8"),
        (("cluster.topology=3x3x3",), ClusterError, "is no v5p slice"),
        (("mesh.tp=2",), ClusterError, "needs 2 devices"),
        (("model.source=/mnt/models/llama",), ModelError, "its name tells no released size"),
    ],
)
def test_what_cannot_be_planned_is_refused_before_compiling(tmp_path: Path, overrides: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        stage.run(recipe(tmp_path, "gemma4-31b-v5p8", *overrides), Progress())
    assert not (tmp_path / "run" / "plan.json").exists()


def test_a_step_that_does_not_compile_is_part_of_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*_: Any) -> Compiled:
        raise CompileError("the step does not compile for v5p 2x2x1: A chip would need 57.1 GiB")

    monkeypatch.setattr("gemma_ray.planning.plan.compiled", compiled)
    plan = stage.run(recipe(tmp_path, "gemma4-31b-v5p8", "serve.accelerator=cpu"), Progress())
    kept = read_json(tmp_path / "run" / "plan.json")
    assert (kept["fits"], kept["compiled"]) == (False, False)
    assert "A chip would need 57.1 GiB" in plan_text(plan)
    with pytest.raises(CompileError, match=r"57\.1 GiB"):
        stage.check(plan)


def test_without_a_compiler_the_arithmetic_is_still_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA_RAY_PLAN_PYTHON", "/bin/true")
    plan = stage.run(recipe(tmp_path, "gemma4-e4b-v6e8"), Progress())
    kept = read_json(tmp_path / "run" / "plan.json")
    assert (kept["fits"], kept["compiled"], kept["serve"]["fits"]) == (None, False, True)
    assert kept["why_not"] == kept["serve"]["why_not_compiled"]
    page = plan_text(plan)
    assert "compute floor" in page
    assert "first token" in page
    assert "GEMMA_RAY_PLAN_PYTHON=/bin/true cannot compile" in page
    with pytest.raises(ToolError, match="/bin/true"):
        stage.check(plan)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (3e-6, "3.00 µs"), (0.0123, "12.3 ms"), (2.929, "2.93 s"), (3636, "1.01 h")])
def test_times_are_shown_in_a_unit_that_shows_something(seconds: float, text: str) -> None:
    assert _time(seconds) == text


@pytest.mark.slow
def test_the_tiny_model_is_compiled_for_a_tpu_and_the_second_time_read_from_the_cache(tmp_path: Path, plan_cache: Path) -> None:
    run = recipe(tmp_path, "quickstart-cpu", f"run.cache_dir={plan_cache}")
    plan = stage.run(run, Progress())
    assert plan.train is not None
    assert plan.train.fits
    assert plan.train.predicted_tokens_per_s > 0
    assert plan.train.base_parameters == pytest.approx(1.7e6, rel=0.1)
    assert any(kept.suffix == ".json" for kept in (plan_cache / "plans").iterdir())
    assert stage.run(run, Progress()).train == plan.train

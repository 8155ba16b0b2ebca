"""What a recipe's `serve` section is planned as, with both caches, and (slow) a prefill and a decode step compiled for a TPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma_ray.benchmarking.config import BenchConfig
from gemma_ray.errors import CompileError, RecipeError
from gemma_ray.models.gemma4 import text_config
from gemma_ray.planning.config import PlanConfig
from gemma_ray.planning.page import serve_text
from gemma_ray.planning.replica import Replica, plan_replica
from gemma_ray.planning.serving import cache_bytes
from gemma_ray.recipe import load_recipe
from raycluster.errors import ClusterError
from workloads.plan import served_on

B31 = text_config("gemma4-31b")
H100 = Replica("h100", 2)


def planned(replica: Replica, engine: dict[str, Any] | None = None, text: Any = B31, contexts: tuple[int, ...] = (512, 4096)) -> Any:
    bench = BenchConfig(contexts=contexts, output_tokens=256)
    return plan_replica(text, replica, engine or {}, bench, PlanConfig(), Path("/nonexistent"), print)


@pytest.mark.parametrize(
    ("recipe", "replica"),
    [
        ("gemma4-31b-v6e8", Replica("v6e", 8, "2x4", "v6e-8")),
        ("gemma4-e4b-v6e8", Replica("v6e", 1, "1x1", "v6e-1")),
        ("gemma4-31b-2xh100", Replica("h100", 2)),
        ("gemma4-31b-v5p8", None),
    ],
)
def test_the_shipped_recipes_replicas(recipe: str, replica: Replica | None) -> None:
    assert served_on(load_recipe(recipe, [])) == replica


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (
            ("serve.accelerator=gpu", "serve.accelerator_type=L4"),
            RecipeError,
            "serve.accelerator_type = 'L4': no figures for it. Known: H100",
        ),
        (("serve.accelerator=gpu",), RecipeError, "of what type"),
        (("serve.accelerator=tpu", "serve.accelerator_type=TPU-V6E", "serve.topology=3x3"), ClusterError, "is no v6e slice"),
    ],
)
def test_a_replica_that_cannot_be_is_refused(overrides: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        served_on(load_recipe("gemma4-31b-v5p8", list(overrides)))


def test_a_gpu_replica_is_arithmetic_for_both_caches() -> None:
    plan = planned(H100)
    assert plan.cache == "bfloat16"
    assert plan.compiled == ()
    assert "h100 is no TPU" in plan.why_not_compiled
    short, long = plan.by_cache["bfloat16"].contexts
    assert plan.by_cache["fp8"].contexts[1].sequences == pytest.approx(2 * long.sequences, abs=1)
    assert short.sequences > long.sequences > 0
    page = serve_text(plan)
    assert "SERVING, PREDICTION" in page
    assert f"{long.sequences}" in page


def test_engine_arguments_of_the_recipe_count() -> None:
    plan = planned(H100, {"kv_cache_dtype": "fp8_e4m3", "max_num_batched_tokens": 256, "gpu_memory_utilization": 0.3})
    assert plan.cache == "fp8"
    assert not plan.by_cache["fp8"].fits  # 30.8 GB of weights a device in 24 of 80 GB
    assert plan.to_json()["fits"] is False
    assert plan.by_cache["fp8"].contexts[0].chunks == ((256, 256), (256, 256))


def test_a_replica_that_cannot_hold_one_sequence_is_not_compiled() -> None:
    plan = planned(Replica("v6e", 1, "1x1", "v6e-1"))
    assert not plan.by_cache["bfloat16"].fits
    assert plan.why_not_compiled == "nothing was compiled: not one sequence fits"
    assert "DOES NOT FIT" in serve_text(plan)


def test_heads_that_do_not_divide_are_named() -> None:
    with pytest.raises(RecipeError, match="serving tp=3"):
        planned(Replica("h100", 3))


@pytest.mark.slow
def test_a_prefill_and_a_decode_step_are_compiled_for_a_tpu(plan_cache: Path) -> None:
    """On one chip the compiled step holds what the arithmetic says: every weight once, and the cache."""
    text = text_config("gemma4-tiny")
    bench = BenchConfig(contexts=(512,), output_tokens=64)
    plan = plan_replica(text, Replica("v6e", 1, "1x1", "v6e-1"), {"max_num_seqs": 8}, bench, PlanConfig(), plan_cache, print)
    prefill, decode = plan.compiled
    assert (prefill.phase, prefill.batch, prefill.tokens) == ("prefill", 1, 512)
    assert (decode.phase, decode.batch, decode.tokens, decode.context) == ("decode", 8, 1, 576)
    arithmetic = plan.by_cache["bfloat16"]
    assert decode.result.weight_bytes == pytest.approx(arithmetic.weight_bytes, rel=0.02)
    unpadded = cache_bytes(text, tp=1, bytes_per_element=2, on_tpu=False, shared=False)
    assert decode.result.cache_bytes == pytest.approx(8 * unpadded.of(512 + 64), rel=0.02)
    assert decode.cycles_s is not None
    assert decode.cycles_s > 0
    assert "compiled decode: 8 x 1 tokens" in serve_text(plan)


def test_a_serving_step_that_does_not_compile_is_part_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled_forward(*_: Any) -> Any:
        raise CompileError("the step does not compile for v6e 2x4: A chip would need 86.9 GiB")

    monkeypatch.setattr("gemma_ray.planning.replica.compiled_forward", compiled_forward)
    plan = planned(Replica("v6e", 8, "2x4", "v6e-8"))
    assert plan.compiled == ()
    assert "prefill: the step does not compile" in plan.why_not_compiled
    assert "decode: the step does not compile" in serve_text(plan)

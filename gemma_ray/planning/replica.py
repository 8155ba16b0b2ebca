"""What one replica of the recipe's `serve` section would hold and do: the arithmetic for both cache precisions, and for TPUs a prefill and
a decode step compiled as evidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma_ray.benchmarking.config import BenchConfig
from gemma_ray.errors import GemmaRayError, ToolError
from gemma_ray.planning.compiler import compiled_forward
from gemma_ray.planning.config import PlanConfig
from gemma_ray.planning.hardware import chip, why_not_described
from gemma_ray.planning.job import CompiledForward, ForwardJob
from gemma_ray.planning.serving import ContextPlan, ServePlan, plan_serving

CACHES = {"bfloat16": 2.0, "fp8": 1.0}
"""Bytes of a key or value, by the cache's precision."""

MEMORY_UTILIZATION = 0.92
"""vLLM 0.31's default (vllm/config/cache.py)."""

# max_num_batched_tokens, max_num_seqs of a server: vLLM 0.31's defaults (vllm/engine/arg_utils.py)
STEP_LIMITS = {"v5e": (512, 256), "v5p": (256, 256), "v6e": (1024, 256), "h100": (8192, 1024), "h200": (8192, 1024)}
OTHER_LIMITS = (2048, 256)


@dataclass(frozen=True)
class Replica:
    """The devices of one copy of the model, all of them in tensor parallelism; `topology` and `pod_type` of TPUs, where the recipe says."""

    accelerator: str
    devices: int
    topology: str | None = None
    pod_type: str | None = None


@dataclass(frozen=True)
class CompiledPhase:
    """A prefill or decode step that XLA:TPU compiled, and the seconds that its cycles are at the chip's clock."""

    phase: str
    batch: int
    tokens: int
    context: int
    result: CompiledForward
    cycles_s: float | None


@dataclass(frozen=True)
class ReplicaPlan:
    """A prediction for one replica, by precision of its cache; `cache` is the recipe's."""

    replica: Replica
    cache: str
    by_cache: dict[str, ServePlan]
    compiled: tuple[CompiledPhase, ...]
    """Evidence beside the arithmetic, not the server's own program."""
    why_not_compiled: str | None
    """Why nothing was compiled, or a step of the two is missing."""

    def to_json(self) -> dict[str, Any]:
        """As JSON, named as a prediction."""
        return {
            "prediction": True,
            "replica": dataclasses.asdict(self.replica),
            "cache": self.cache,
            "fits": self.by_cache[self.cache].fits,
            "by_cache": {name: plan.to_json() for name, plan in self.by_cache.items()},
            "compiled": [dataclasses.asdict(phase) for phase in self.compiled],
            "why_not_compiled": self.why_not_compiled,
        }


def plan_replica(
    text: dict[str, Any],
    replica: Replica,
    engine: dict[str, Any],
    bench: BenchConfig,
    config: PlanConfig,
    cache: Path,
    progress: Callable[[str], None],
    no_compiler: str | None = None,
) -> ReplicaPlan:
    """The plan of a replica for the prompts and answers of the `bench` section. `text` is config.json's text part, `engine` the recipe's
    engine arguments, `no_compiler` why none can be had.

    A step that does not compile is part of the answer, and so is a compiler that cannot be had. Raises RecipeError when the devices do not
    divide the model's heads.
    """
    row = chip(replica.accelerator, config.hardware)
    step_tokens, sequences = STEP_LIMITS.get(replica.accelerator, OTHER_LIMITS)
    step_tokens = engine.get("max_num_batched_tokens") or step_tokens
    sequences = min(engine.get("max_num_seqs") or sequences, step_tokens)
    by_cache = {
        name: plan_serving(
            text,
            row,
            replica.devices,
            replica.devices,
            config.weight_bytes,
            size,
            bench.contexts,
            bench.output_tokens,
            memory_utilization=engine.get("gpu_memory_utilization") or MEMORY_UTILIZATION,
            max_num_batched_tokens=step_tokens,
            max_num_seqs=sequences,
        )
        for name, size in CACHES.items()
    }
    precision = "fp8" if str(engine.get("kv_cache_dtype", "")).startswith("fp8") else "bfloat16"
    fitting = [c for c in by_cache["bfloat16"].contexts if c.full]
    plan = ReplicaPlan(replica, precision, by_cache, (), _why_not(text, replica, fitting) or no_compiler)
    if plan.why_not_compiled is not None:
        return plan
    longest = max(fitting, key=lambda c: c.context)
    phases, refused = [], []
    for name, job in _jobs(text, replica, longest, min(step_tokens, *bench.contexts), bench.output_tokens).items():
        progress(f"   the {name} step: {job.batch} x {job.tokens} tokens")
        try:
            found = compiled_forward(job, str(replica.pod_type), cache, progress)
        except GemmaRayError as e:
            refused.append(f"{name}: {e}")
            if isinstance(e, ToolError):
                break
            continue
        seconds = found.cycles / row.clock_hz if row.clock_hz else None
        phases.append(CompiledPhase(name, job.batch, job.tokens, job.context, found, seconds))
    return dataclasses.replace(plan, compiled=tuple(phases), why_not_compiled="; ".join(refused) or None)


def _why_not(text: dict[str, Any], replica: Replica, fitting: list[ContextPlan]) -> str | None:
    if replica.topology is None:
        return f"nothing was compiled: {replica.accelerator} is no TPU, or serve.topology is not given"
    if why := why_not_described(replica.accelerator, replica.topology):
        return why
    if text.get("enable_moe_block"):
        return "nothing was compiled: experts are not supported"
    return None if fitting else "nothing was compiled: not one sequence fits"


def _jobs(text: dict[str, Any], replica: Replica, longest: ContextPlan, chunk: int, output: int) -> dict[str, ForwardJob]:
    """A shortest prompt, or its first chunk, and a token for each of as many of the longest sequences as fit."""
    batch = longest.full.batch if longest.full else 1
    place = (text, replica.accelerator, str(replica.topology))
    return {
        "prefill": ForwardJob(*place, batch=1, tokens=chunk, context=chunk),
        "decode": ForwardJob(*place, batch=batch, tokens=1, context=longest.context + output),
    }

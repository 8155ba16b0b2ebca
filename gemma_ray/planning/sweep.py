"""`gemma-ray plan --sweep`: what else the same training could run as, compiled within a time limit.

    recipe ─► variants: mesh × remat × rows at once, then splash blocks of the best ─► each compiled at two depths ─► Pareto table

Nothing that is varied changes what is learnt: a step keeps its rows and its result. A model of like layers is compiled one and two
periods of its layers deep, and the figures continued to its depth in a straight line, which takes a fraction of the time; `gemma-ray plan`
with the variant's overrides compiles it whole.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from gemma_ray.errors import RecipeError, StageError
from gemma_ray.planning.compiler import compiled, stop_compilers
from gemma_ray.planning.hardware import Chip
from gemma_ray.planning.job import Compiled, CompileJob, Traffic
from gemma_ray.planning.train import TrainPlan, plan_training
from gemma_ray.training.config import Remat
from gemma_ray.training.sharding import working_meshes

BLOCKS = (256, 1024)
"""Splash blocks that are tried besides the default."""


@dataclass(frozen=True)
class Tried:
    """A variant and what is predicted of it; without `plan` it does not compile, and `why_not` says why."""

    overrides: dict[str, Any]
    """Recipe keys and values that make it."""
    plan: TrainPlan | None
    why_not: str | None
    best_for_its_memory: bool = False
    """No other variant that fits is as fast with less memory: it is on the Pareto front."""

    @property
    def speed(self) -> float:
        """Predicted tokens a second; 0 where it does not compile."""
        return self.plan.predicted_tokens_per_s if self.plan else 0.0

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {**dataclasses.asdict(self), "plan": self.plan.to_json() if self.plan else None}


@dataclass(frozen=True)
class Sweep:
    """A prediction. `left` variants were not compiled for want of time."""

    tried: tuple[Tried, ...]
    left: int
    depths: tuple[int, int] | None
    """Layers that were compiled in place of the model's own number; None when it was compiled whole."""

    def to_json(self) -> dict[str, Any]:
        """The content of sweep.json."""
        return {"prediction": True, "left": self.left, "depths": self.depths, "tried": [tried.to_json() for tried in self.tried]}


def run_sweep(
    job: CompileJob,
    pod_type: str,
    chip: Chip,
    steps: int,
    usd_per_hour: float | None,
    efficiency: float,
    limit_s: float,
    cache: Path,
    progress: Callable[[str], None],
) -> Sweep:
    """Compile variants of a recipe's job until there are no more, or `limit_s` seconds have passed. The recipe's own comes first.

    A variant that does not compile is a row that says why.
    """
    depths = compile_depths(job.text)
    began = time.monotonic()
    tried: list[Tried] = []

    def out_of_time() -> bool:
        return time.monotonic() - began > limit_s

    def attempt(variant: CompileJob) -> None:
        overrides = overrides_of(variant)
        progress(f"   {', '.join(f'{key}={value}' for key, value in overrides.items())}")
        try:
            found = _compiled_by_depth(variant, depths, pod_type, cache, progress)
            tried.append(Tried(overrides, plan_training(variant, found, chip, steps, usd_per_hour, efficiency), None))
        except (RecipeError, StageError) as e:
            tried.append(Tried(overrides, None, str(e)))

    waiting = list(variants(job))
    while waiting and not (tried and out_of_time()):
        attempt(waiting.pop(0))
    best = fastest(tried)
    blocks = [dataclasses.replace(with_overrides(job, best.overrides), splash_block=side) for side in BLOCKS] if best else []
    while blocks and not out_of_time():
        attempt(blocks.pop(0))
    return Sweep(tuple(on_front(tried)), len(waiting) + len(blocks), depths)


def variants(job: CompileJob) -> Iterator[CompileJob]:
    """The job, then the same for every mesh, remat policy and number of rows at once that suit it, those with the job's own rows first."""
    yield job
    divisors = [n for n in range(1, job.batch_size + 1) if job.batch_size % n == 0]
    for micro_batches in sorted(divisors, key=lambda n: (n != job.micro_batches, n)):
        for fsdp, tp in reversed(working_meshes(job.text, job.batch_size // micro_batches, job.fsdp * job.tp)):
            for remat in get_args(Remat):
                variant = dataclasses.replace(job, micro_batches=micro_batches, fsdp=fsdp, tp=tp, remat=remat)
                if variant != job:
                    yield variant


def overrides_of(job: CompileJob) -> dict[str, Any]:
    """The recipe's keys that a sweep varies, with this job's values."""
    found: dict[str, Any] = {"mesh.fsdp": job.fsdp, "mesh.tp": job.tp, "train.remat": job.remat, "train.micro_batches": job.micro_batches}
    return {**found, "train.splash_block": job.splash_block} if job.splash_block else found


def with_overrides(job: CompileJob, overrides: dict[str, Any]) -> CompileJob:
    """The inverse."""
    return dataclasses.replace(job, **{key.partition(".")[2]: value for key, value in overrides.items()})


def fastest(tried: list[Tried]) -> Tried | None:
    """The fastest variant that fits."""
    return max((t for t in tried if t.plan and t.plan.fits), key=lambda t: t.speed, default=None)


def on_front(tried: list[Tried]) -> list[Tried]:
    """The variants, fastest first, those that do not compile last, and the Pareto front of speed and memory marked."""
    least, marked = float("inf"), []
    for t in sorted(tried, key=lambda t: -t.speed):
        better = t.plan is not None and t.plan.fits and t.plan.device_bytes.total < least
        least = t.plan.device_bytes.total if t.plan and better else least
        marked.append(dataclasses.replace(t, best_for_its_memory=better))
    return marked


def compile_depths(text: dict[str, Any]) -> tuple[int, int] | None:
    """Two depths to compile in place of a model whose layers repeat with a period: one period and two. None when the model is not three
    periods deep, or layers take keys and values of others, so that it has to be compiled whole."""
    kinds = text["layer_types"]
    period = next(p for p in range(1, len(kinds) + 1) if len(kinds) % p == 0 and kinds == kinds[:p] * (len(kinds) // p))
    return None if len(kinds) < 3 * period or text.get("num_kv_shared_layers") else (period, 2 * period)


def _compiled_by_depth(job: CompileJob, depths: tuple[int, int] | None, pod_type: str, cache: Path, progress: Any) -> Compiled:
    if depths is None:
        return compiled(job, pod_type, cache, progress)

    def at(depth: int) -> Compiled:
        text = {**job.text, "num_hidden_layers": depth, "layer_types": job.text["layer_types"][:depth]}
        say = progress if depth == max(depths) else lambda _: None  # both at a time would say the same twice
        return compiled(dataclasses.replace(job, text=text), pod_type, cache, say)

    with ThreadPoolExecutor(2) as pool:
        try:
            shallow, deep = pool.map(at, depths)
        except BaseException:
            stop_compilers()
            raise
    return continued(shallow, deep, depths, job.text["num_hidden_layers"])


def continued(shallow: Compiled, deep: Compiled, depths: tuple[int, int], layers: int) -> Compiled:
    """The figures of two depths continued in a straight line to `layers`; times and host memory are those that were spent."""

    def line(a: Any, b: Any) -> Any:
        at = b + (b - a) / (depths[1] - depths[0]) * (layers - depths[1])
        return round(at) if isinstance(b, int) else at

    def numbers(a: Any, b: Any) -> dict[str, Any]:
        """Every number of the later of two records, continued."""
        names = [field.name for field in dataclasses.fields(b)]
        return {name: line(getattr(a, name), getattr(b, name)) for name in names if isinstance(getattr(b, name), int | float)}

    before = {(t.kind, t.devices): t for t in shallow.traffic}

    def traffic(t: Traffic) -> Traffic:
        then = before.get((t.kind, t.devices), Traffic(t.kind, t.devices, 0, 0, 0, 0, 0))
        continued = {name: max(0, value) for name, value in numbers(then, t).items()}
        return dataclasses.replace(t, **{**continued, "devices": t.devices})

    spent = {"compile_s": shallow.compile_s + deep.compile_s, "host_bytes": max(shallow.host_bytes, deep.host_bytes)}
    return dataclasses.replace(
        deep,
        **{**numbers(shallow, deep), **spent},
        kernels={name: line(shallow.kernels.get(name, 0), count) for name, count in deep.kernels.items()},
        slowest=(),
        traffic=tuple(traffic(t) for t in deep.traffic),
    )

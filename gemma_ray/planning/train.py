"""A training plan: what the compiler says of the step, beside what the chip can do, and what follows for hours and money.

device bytes                base + adapter + optimizer + batch + temporaries        against HBM
compute floor               FLOPs / peak                                            ┐
memory floor                bytes moved / HBM bandwidth                             ├ rooflines (bytes in vector memory count)
interconnect floor          bytes on the links / link bandwidth                     ┘
XLA's estimate              Σ over operations of the larger of compute and memory   an ideal schedule, without attention kernels
predicted step              Σ cycles / clock + attention + collectives waited for,  what hours and cost follow from
                            and no less than any roofline
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from gemma_ray.errors import RecipeError
from gemma_ray.planning.hardware import Chip
from gemma_ray.planning.job import Compiled, CompileJob
from gemma_ray.planning.sizes import SPLASH_BACKWARD, splash_flops_per_token

HEADROOM = 0.9
"""A step that takes more of HBM than this is said not to fit: XLA's own buffers, fragmentation and the runtime need the rest."""


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes of one device."""

    base: int
    adapter: int
    optimizer: int
    batch: int
    temporaries: int
    peak: int

    @property
    def total(self) -> int:
        """Arguments and temporaries, or XLA's own peak where that is more."""
        return max(self.peak, self.base + self.adapter + self.optimizer + self.batch + self.temporaries)


@dataclass(frozen=True)
class TrainPlan:
    """A prediction for one recipe's step. Seconds and FLOPs are of one step, FLOPs and bytes of one device."""

    tokens_per_step: int
    steps: int
    device_bytes: DeviceBytes
    hbm_bytes: int
    fits: bool
    base_parameters: int
    trained_parameters: int
    flops: float
    """XLA's count, loop bodies as often as they run."""
    attention_flops: float
    """By formula, whole blocks of the splash kernel: forward once, backward 3.5 times that, and once more where it is computed again."""
    bytes_moved: float
    collectives: tuple[dict[str, Any], ...]
    collective_bytes: int
    compute_floor_s: float
    memory_floor_s: float
    interconnect_floor_s: float
    xla_s: float | None
    """XLA's `optimal_seconds`, loop bodies as often as they run; None where XLA gives nonsense (v6e)."""
    cycles_s: float
    attention_s: float
    waiting_s: float
    predicted_step_s: float
    xla_tokens_per_s: float | None
    predicted_tokens_per_s: float
    predicted_hours: float
    predicted_cost_usd: float | None
    slowest: tuple[tuple[str, float], ...]
    kernels: dict[str, int]
    compile_s: float
    compile_host_bytes: int
    versions: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """As JSON, the total of the device's bytes added."""
        document = dataclasses.asdict(self)
        return {**document, "device_bytes": {**document["device_bytes"], "total": self.device_bytes.total}}


def plan_training(job: CompileJob, found: Compiled, chip: Chip, steps: int, usd_per_hour: float | None, efficiency: float) -> TrainPlan:
    """The plan of a compiled step. `usd_per_hour` is of the whole slice, `efficiency` the attention kernel's share of peak FLOP/s."""
    devices = job.fsdp * job.tp
    used = DeviceBytes(
        found.base_bytes, found.adapter_bytes, found.optimizer_bytes, found.batch_bytes, found.temporary_bytes, found.peak_bytes
    )
    attention = 0.0
    if found.kernels:
        forward = splash_flops_per_token(job.text, job.length, job.splash_block)
        attention = (1 + SPLASH_BACKWARD + (job.remat == "layer")) * forward * job.tokens / devices
    if chip.clock_hz is None:
        raise RecipeError(f"{chip.name}: no clock known, without which XLA's cycles mean nothing; set plan.hardware.clock_hz")
    clock = chip.clock_hz
    cycles_s = found.cycles / clock
    attention_s = attention / (chip.bf16_flops * efficiency)
    link_bytes = sum(t.link_bytes for t in found.traffic)
    waiting_s = sum(t.exposed_link_bytes for t in found.traffic) / chip.interconnect_bandwidth
    flops = found.flops + found.loop_flops
    xla_s = found.optimal_s + found.loop_cycles / clock if found.optimal_s > 0 else None
    rooflines = {
        "compute_floor_s": (flops + attention) / chip.bf16_flops,
        "memory_floor_s": found.bytes_accessed / chip.hbm_bandwidth,
        "interconnect_floor_s": link_bytes / chip.interconnect_bandwidth,
    }
    step_s = max(cycles_s + attention_s + waiting_s, *rooflines.values())
    hours = steps * step_s / 3600
    return TrainPlan(
        tokens_per_step=job.tokens,
        steps=steps,
        device_bytes=used,
        hbm_bytes=chip.hbm_bytes,
        fits=used.total <= HEADROOM * chip.hbm_bytes,
        base_parameters=found.base_parameters,
        trained_parameters=found.trained_parameters,
        flops=flops,
        attention_flops=attention,
        bytes_moved=found.bytes_accessed,
        collectives=tuple(dataclasses.asdict(t) for t in found.traffic),
        collective_bytes=link_bytes,
        **rooflines,
        xla_s=xla_s,
        cycles_s=cycles_s,
        attention_s=attention_s,
        waiting_s=waiting_s,
        predicted_step_s=step_s,
        xla_tokens_per_s=None if xla_s is None else job.tokens / xla_s,
        predicted_tokens_per_s=job.tokens / step_s,
        predicted_hours=hours,
        predicted_cost_usd=None if usd_per_hour is None else hours * usd_per_hour,
        slowest=found.slowest,
        kernels=found.kernels,
        compile_s=found.compile_s,
        compile_host_bytes=found.host_bytes,
        versions=found.versions,
    )


def assumptions(job: CompileJob, chip: Chip, efficiency: float) -> dict[str, str]:
    """What a training plan rests on, by name."""
    return {
        "prediction": "nothing was run: the step was compiled ahead of time for a TPU that is not there",
        "chip": f"{chip.name}: {chip.bf16_flops:.3g} FLOP/s, {chip.hbm_bytes / 2**30:.0f} GiB at {chip.hbm_bandwidth:.3g} B/s, "
        f"links {chip.interconnect_bandwidth:.3g} B/s, {(chip.clock_hz or 0) / 1e9:.2f} GHz ({chip.source}, {chip.as_of})",
        "cycles": "XLA's estimate for each operation, one after another; for Pallas kernels and collectives it has none",
        "attention": f"splash's blocks by formula at {efficiency:.0%} of peak (plan.attention_efficiency), rows of one document each",
        "collectives": "those that XLA scheduled beside computation are hidden, the others wait for the links at full bandwidth",
        "tokens": f"rows of {job.length} tokens, padding included; useful tokens are fewer by the data's padding",
        "not counted": "start-up and compilation, reading data, checkpoints, evaluation, lost time",
        "fits": f"at most {HEADROOM:.0%} of HBM",
    }

"""Accelerators to hosts: what `accelerator: v5p, topology: 2x2x2` means in hosts, devices, Ray resources and labels.

    v5p 2x2x2 = 8 chips = 2 hosts x 4 chips, pod type v5p-16 (v4 and v5p count cores, two a chip; v5e and v6e count chips)
    v6e 2x4   = 8 chips = 1 host x 8 chips, pod type v6e-8 (v5e and v6e have single-host machines of up to 8 chips)

The rules are those of Ray 2.60 (`ray.util.tpu`, `ray._private.accelerators.tpu`), restated because a recipe is checked before Ray is
imported; `tests/raycluster/test_slices.py` holds them against Ray's own. One JAX process runs on each host.

Several slices of one kind make one program (multi-slice): the chips of a slice are joined by its own network (ICI), the slices by the data
centre's (DCN). A mesh covers one slice, and the others hold copies of it.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, replace

from raycluster.errors import ClusterError

# 2D tori of v5e and v6e: https://cloud.google.com/tpu/docs/v6e, https://cloud.google.com/tpu/docs/v5e
TOPOLOGIES_2D = ("1x1", "2x2", "2x4", "2x8", "4x4", "4x8", "8x8", "8x16", "16x16")
# 3D slices smaller than a cube of 64 chips; above, every axis is a multiple of 4: https://cloud.google.com/tpu/docs/v5p, .../v4
SMALL_TOPOLOGIES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")


@dataclass(frozen=True)
class Accelerator:
    """One row of the table.

    `ray_type` is Ray's accelerator type (`ray.util.accelerators`), `gke_label` the value of GKE's node label
    `cloud.google.com/gke-tpu-accelerator` or `cloud.google.com/gke-accelerator`.
    """

    name: str
    resource: str
    ray_type: str | None
    chips_per_host: int
    gke_label: str | None
    pod_prefix: str | None = None
    cores_per_chip: int = 1
    dimensions: int = 0
    largest: tuple[int, ...] = ()
    single_host_chips: int = 0

    @property
    def is_tpu(self) -> bool:
        return self.resource == "TPU"

    def accepts(self, topology: str) -> bool:
        """Whether a slice of this topology exists."""
        if self.dimensions == 2:
            return topology in TOPOLOGIES_2D
        sides = [int(side) for side in topology.split("x")]
        in_cubes = all(side % 4 == 0 and 0 < side <= limit for side, limit in zip(sides, self.largest, strict=False))
        return len(sides) == 3 and (topology in SMALL_TOPOLOGIES_3D or in_cubes)

    def valid_topologies(self) -> str:
        """The valid topologies in words, for messages."""
        if self.dimensions == 2:
            return ", ".join(TOPOLOGIES_2D)
        return f"{', '.join(SMALL_TOPOLOGIES_3D)}, or multiples of 4 up to {'x'.join(map(str, self.largest))}"

    def chips_on_host(self, topology: str) -> int:
        """Chips that one host of a slice has: all of them up to 8 on v5e and v6e (Ray: 2x8 and up have hosts of 4), else 4."""
        chips = count_chips(topology)
        return chips if chips <= self.single_host_chips else self.chips_per_host


# Chips, cores and hosts: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm; GKE labels:
# https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus and .../how-to/gpus; GPUs of a host: a3-highgpu-8g,
# a3-ultragpu-8g and a2-highgpu-8g in https://cloud.google.com/compute/docs/gpus
ACCELERATORS: dict[str, Accelerator] = {
    row.name: row
    for row in (
        Accelerator("v4", "TPU", "TPU-V4", 4, "tpu-v4-podslice", "v4", cores_per_chip=2, dimensions=3, largest=(12, 12, 16)),
        Accelerator("v5p", "TPU", "TPU-V5P", 4, "tpu-v5p-slice", "v5p", cores_per_chip=2, dimensions=3, largest=(16, 16, 24)),
        Accelerator("v5e", "TPU", "TPU-V5LITEPOD", 4, "tpu-v5-lite-podslice", "v5litepod", dimensions=2, single_host_chips=8),
        Accelerator("v6e", "TPU", "TPU-V6E", 4, "tpu-v6e-slice", "v6e", dimensions=2, single_host_chips=8),
        Accelerator("h100", "GPU", "H100", 8, "nvidia-h100-80gb"),
        Accelerator("h200", "GPU", "H200", 8, "nvidia-h200-141gb"),
        Accelerator("a100", "GPU", "A100", 8, "nvidia-tesla-a100"),
        Accelerator("cpu", "CPU", None, 1, None),
    )
}


@dataclass(frozen=True)
class Slice:
    """The hosts and devices that a run uses; `hosts` counts those of all its slices. Build it with `resolve`."""

    accelerator: Accelerator
    topology: str | None
    hosts: int
    devices_per_host: int
    emulate: bool = False
    slices: int = 1

    @property
    def devices(self) -> int:
        """Devices in all: what `jax.device_count()` says in the workers."""
        return self.hosts * self.devices_per_host

    @property
    def hosts_per_slice(self) -> int:
        return self.hosts // self.slices

    @property
    def devices_per_slice(self) -> int:
        return self.devices // self.slices

    @property
    def resource(self) -> str:
        """The Ray resource of a device: TPU, GPU or CPU."""
        return self.accelerator.resource

    @property
    def accelerator_type(self) -> str | None:
        """Ray's accelerator type, such as TPU-V5P or H100; None for cpu."""
        return self.accelerator.ray_type

    @property
    def pod_type(self) -> str | None:
        """The TPU pod type, such as v5p-16, that counts cores or chips as the generation does; None off TPU."""
        if self.topology is None:
            return None
        return f"{self.accelerator.pod_prefix}-{count_chips(self.topology) * self.accelerator.cores_per_chip}"

    @property
    def worker_resources(self) -> dict[str, int]:
        """Ray resources of the one worker process on each host. A cpu worker takes one CPU whatever its number of devices.

        The numbers are integers: Ray's JAX set-up counts GPUs with `range` (2.60, train/v2/jax/config.py).
        """
        return {"CPU": 1} if self.resource == "CPU" else {self.resource: self.devices_per_host}

    @property
    def forces_host_devices(self) -> bool:
        """Whether the devices are CPU devices that XLA is told to pretend."""
        return self.emulate or self.resource == "CPU"

    def describe(self) -> str:
        """The slice in a few words: `v5p 2x2x2, 2 hosts x 4 TPU, emulated`, or `2 slices of v5p 2x2x2, 4 hosts x 4 TPU`."""
        several = f"{self.slices} slices of " if self.slices > 1 else ""
        hosts = f"{self.hosts} host{'s' if self.hosts > 1 else ''} x {self.devices_per_host} {self.resource}"
        return (
            f"{several}{self.accelerator.name} {self.topology + ', ' if self.topology else ''}{hosts}{', emulated' if self.emulate else ''}"
        )


def resolve(
    accelerator: str,
    topology: str | None = None,
    hosts: int = 1,
    devices_per_host: int | None = None,
    emulate: bool = False,
    slices: int = 1,
) -> Slice:
    """The slice that these values describe.

    TPU: `topology` says everything, `hosts` may be left at 1; `slices` of that topology make one multi-slice. An emulated slice may be
    cut into other hosts with `devices_per_host` (v5p 2x2x1 as 2 hosts x 2 devices, which no real slice is). GPU: `hosts` nodes with
    `devices_per_host` GPUs each. cpu: `hosts` processes with `devices_per_host` XLA CPU devices each (default 1). Emulation runs any of
    them on CPU processes that Ray sees as such hosts.

    Raises ClusterError naming the value and what is valid.
    """
    row = ACCELERATORS.get(accelerator)
    if row is None:
        near = difflib.get_close_matches(accelerator.lower(), ACCELERATORS, n=1, cutoff=0.5)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ClusterError(f"unknown accelerator '{accelerator}'.{hint} Known: {', '.join(ACCELERATORS)}")
    if hosts < 1 or (devices_per_host is not None and devices_per_host < 1):
        raise ClusterError(f"hosts = {hosts}, devices_per_host = {devices_per_host}: both must be at least 1")
    if slices < 1 or (slices > 1 and not row.is_tpu):
        remedy = "must be at least 1" if slices < 1 else f"{row.name} is not made of slices. Leave it out, and use more hosts"
        raise ClusterError(f"slices = {slices}: {remedy}")
    if row.is_tpu:
        one = _resolve_tpu(row, topology, hosts, devices_per_host, emulate)
        return replace(one, hosts=one.hosts * slices, slices=slices)
    if topology is not None:
        raise ClusterError(f"topology '{topology}': {row.name} has none. Remove it, and give hosts and devices_per_host")
    devices = devices_per_host or row.chips_per_host
    if row.resource == "GPU" and devices > row.chips_per_host:
        raise ClusterError(f"devices_per_host = {devices}: a {row.name} host has {row.chips_per_host}. Use more hosts")
    return Slice(row, None, hosts, devices, emulate)


def _resolve_tpu(row: Accelerator, topology: str | None, hosts: int, devices_per_host: int | None, emulate: bool) -> Slice:
    example = "2x2x1" if row.dimensions == 3 else "2x4"
    if topology is None:
        raise ClusterError(f"{row.name} needs a topology, for example {example}. Valid: {row.valid_topologies()}")
    name = topology.strip().lower()
    if not re.fullmatch(r"\d+(x\d+)*", name):
        raise ClusterError(f"topology '{topology}' is not of the form {example}")
    if name.count("x") + 1 != row.dimensions:
        raise ClusterError(f"topology '{topology}': {row.name} has {row.dimensions} dimensions, for example {example}")
    if not row.accepts(name):
        raise ClusterError(f"topology '{topology}' is no {row.name} slice. Valid: {row.valid_topologies()}")
    chips, natural = count_chips(name), row.chips_on_host(name)
    devices = devices_per_host or natural
    if chips % devices:
        raise ClusterError(f"devices_per_host = {devices} does not divide the {chips} chips of {row.name} {name}")
    if devices != natural and not emulate:
        raise ClusterError(
            f"devices_per_host = {devices}: a host of {row.name} {name} has {natural} chips. Only an emulated slice can differ"
        )
    if hosts not in (1, chips // devices):
        raise ClusterError(f"hosts = {hosts}: {row.name} {name} with {devices} chips a host has {chips // devices}. Leave hosts out")
    return Slice(row, name, chips // devices, devices, emulate)


def count_chips(topology: str) -> int:
    """Chips of a topology: `2x2x2` is 8."""
    return math.prod(int(side) for side in topology.split("x"))


def fallbacks(slice: Slice, least: int | None) -> list[Slice]:
    """What a run may go on with when it loses hosts, the largest first: fewer slices of a TPU, fewer hosts of another accelerator.

    `least` is the smallest number of either; None allows nothing smaller. Raises ClusterError when it is more than the slice has.
    """
    has, unit = (slice.slices, "slices") if slice.topology else (slice.hosts, "hosts")
    if least is None:
        return []
    if not 1 <= least <= has:
        raise ClusterError(f"min_{unit} = {least}: {slice.describe()} has {has} {unit}. Choose from 1 to {has}")
    if slice.topology:
        return [replace(slice, slices=n, hosts=n * slice.hosts_per_slice) for n in range(has - 1, least - 1, -1)]
    return [replace(slice, hosts=n) for n in range(has - 1, least - 1, -1)]


def check_mesh(slice: Slice, fsdp: int, tp: int) -> None:
    """Raise ClusterError unless a (fsdp, tp) mesh uses each device of one slice exactly once; further slices hold copies of it."""
    devices = slice.devices_per_slice
    if fsdp * tp == devices:
        return
    fits = ", ".join(f"{devices // n}x{n}" for n in range(1, devices + 1) if devices % n == 0)
    has = f"{slice.describe()} has {devices}{' in a slice, which is what a mesh covers' if slice.slices > 1 else ''}"
    raise ClusterError(f"mesh fsdp={fsdp} x tp={tp} needs {fsdp * tp} devices, and {has}. Meshes (fsdp x tp) that fit: {fits}")

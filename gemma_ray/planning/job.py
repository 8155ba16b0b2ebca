"""What is compiled, and what came of it: the documents that the planner and its compiling process exchange.

CompileJob ─► compile_step    ─► Compiled
ForwardJob ─► compile_forward ─► CompiledForward
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import TypeAdapter


class Document:
    """A data class that goes from process to process and into the cache as JSON."""

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        """The inverse. Raises ValueError when a field is missing or of another kind."""
        return TypeAdapter(cls).validate_python(document)


@dataclass(frozen=True)
class CompileJob(Document):
    """A training step, as far as its program depends on it. Nothing here changes what is learnt by how much."""

    MODULE: ClassVar[str] = "gemma_ray.planning.compile_step"
    text: dict[str, Any]
    """config.json's text part."""
    accelerator: str
    """A TPU generation as XLA names it, such as v5p."""
    topology: str
    """Chips, such as 2x2x1."""
    fsdp: int
    tp: int
    dtype: str
    mode: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    batch_size: int
    micro_batches: int
    length: int
    remat: str
    attention: str
    clip: bool
    splash_block: int | None = None
    dropout: float = 0.0
    optimizer: str = "adamw"

    @property
    def tokens(self) -> int:
        """Positions of the rows of one step, padding included."""
        return self.batch_size * self.length


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one step, on one device."""

    kind: str
    devices: int
    count: int
    payload_bytes: int
    link_bytes: int
    overlapped: int
    """How many of `count` run beside computation."""
    exposed_link_bytes: int
    """Of `link_bytes`, those that computation waits for."""


@dataclass(frozen=True)
class Compiled(Document):
    """What XLA:TPU says of a compiled step. Bytes, FLOPs and seconds are of one device and one step."""

    base_bytes: int
    adapter_bytes: int
    optimizer_bytes: int
    batch_bytes: int
    temporary_bytes: int
    peak_bytes: int
    base_parameters: int
    trained_parameters: int
    flops: float
    """As XLA counts: a loop's body once, attention kernels not at all."""
    loop_flops: float
    """What the first of those leaves out."""
    bytes_accessed: float
    optimal_s: float
    """XLA's `optimal_seconds`: the sum over operations of the larger of compute and memory time, a loop's body once."""
    cycles: float
    """Sum of the compiler's cycles for every operation, loop bodies as often as they run."""
    product_cycles: float
    loop_cycles: float
    """Of `cycles`, those of every run of a loop's body but the first."""
    kernels: dict[str, int]
    """Pallas kernels by name, without an estimate."""
    slowest: tuple[tuple[str, float], ...]
    """Operations by cycles."""
    traffic: tuple[Traffic, ...]
    compile_s: float
    host_bytes: int
    """Largest resident memory of the compiling process."""
    versions: dict[str, str]


@dataclass(frozen=True)
class ForwardJob(Document):
    """A serving step of `batch` sequences on one replica: a prompt of `tokens`, or one token each, with room for `context` in the cache."""

    MODULE: ClassVar[str] = "gemma_ray.planning.compile_forward"
    text: dict[str, Any]
    accelerator: str
    topology: str
    batch: int
    tokens: int
    context: int

    @property
    def chips(self) -> int:
        """All of them in tensor parallelism."""
        return math.prod(int(side) for side in self.topology.split("x"))


@dataclass(frozen=True)
class CompiledForward(Document):
    """What XLA:TPU says of a serving step. Bytes, FLOPs and cycles are of one device and one step."""

    weight_bytes: int
    cache_bytes: int
    temporary_bytes: int
    peak_bytes: int
    flops: float
    bytes_accessed: float
    cycles: float
    collectives: int
    link_bytes: int
    compile_s: float
    host_bytes: int
    versions: dict[str, str]

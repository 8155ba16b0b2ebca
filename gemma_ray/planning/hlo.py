"""Reads the optimised program that XLA:TPU writes as text: `program = parse(compiled.as_text())`, then ask.

Every answer sums over instructions, each as often as its computation runs: once, times the trips of the loops around it (XLA's own totals
count a loop's body once). Branches of a conditional all count. Sizes are one device's, without the padding of tiles. XLA:TPU's dialect:
a matrix product is a `convolution`, mostly in a fusion; a reduce-scatter is an all-reduce in an `all-reduce-scatter*`; a collective
beside other work is `KIND-start` and `KIND-done`, or a fusion ending in the custom call `AsyncCollectiveStart`, products that carry it
along and a fusion ending in `AsyncCollectiveDone`, all on one channel.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from gemma_ray.planning.hlo_text import Computation, Instruction, Loop, Program, parse

__all__ = ["Collective", "Cycles", "Loop", "Program", "collectives", "estimated_cycles", "parse", "repeated_flops"]

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
PRODUCTS = ("convolution", "dot")


@dataclass(frozen=True, slots=True)
class Collective:
    """All collectives of one kind and group size (2 for a collective-permute, which goes from chip to chip) in one run, on one chip.

    `payload_bytes` is the whole array: an all-gather's result, else the input. `link_bytes` is what a chip sends in a ring of n: (n-1)/n of
    the payload, twice that in an all-reduce, all of it in a collective-permute. `overlapped` of `count` have other work scheduled between
    their start and end, whether enough or not; `exposed_link_bytes` are the others' link bytes.
    """

    kind: str
    group_size: int
    count: int
    payload_bytes: int
    link_bytes: int
    overlapped: int
    exposed_link_bytes: int


@dataclass(frozen=True, slots=True)
class Cycles:
    """XLA's estimates, in cycles of the chip's clock; collectives and Pallas kernels have none.

    Of `total`, `products` are in operations that hold a matrix product, `repeated` in runs of a loop's body but the first. `kernels` counts
    runs of Pallas kernels by name; `slowest` has `op_name type ×runs` and cycles, like operations of like layers taken together.
    """

    total: int
    products: int
    repeated: int
    kernels: dict[str, int]
    slowest: tuple[tuple[str, float], ...]


def collectives(program: Program) -> tuple[Collective, ...]:
    """Collectives by kind and group size, most `link_bytes` first. Those of one chip alone are left out."""
    sums: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    for computation in program.computations.values():
        times = program.runs[computation.name] * (computation.name not in program.inner)
        for kind, size, payload, overlapped in _scheduled(program, computation) if times else ():
            links = payload * (1 if kind == "collective-permute" else (size - 1) / size * (2 if kind == "all-reduce" else 1))
            for place, value in enumerate((1, payload, links, overlapped, 0 if overlapped else links)):
                sums[kind, size][place] += value * times
    found = (Collective(kind, size, *map(round, values)) for (kind, size), values in sums.items())
    return tuple(sorted(found, key=lambda c: -c.link_bytes))


def _scheduled(program: Program, computation: Computation) -> list[tuple[str, int, int, bool]]:
    """Kind, group size, payload and whether it is overlapped, of each collective that a computation starts."""
    found, work = list[tuple[str, int, int, bool]](), 0
    pending: dict[str, tuple[int, int]] = {}  # what ends it → its place in `found`, and the work before it
    for i in computation.instructions.values():
        ended = pending.pop(i.operands[0], None) if i.opcode.endswith("-done") else None
        for holder, c in _held(program, computation, i):
            target, channel = holder.root.attribute('custom_call_target="'), "channel " + c.attribute("channel_id=")
            if target == "AsyncCollectiveDone":
                ended = pending.pop(channel, None)
            elif channel not in pending and (size := _group_size(c, program.devices)) > 1:
                if target == "AsyncCollectiveStart" or i.opcode.endswith("-start"):
                    pending[i.name if i.opcode.endswith("-start") else channel] = (len(found), work)
                found.append((*_kind_and_payload(holder, c, size), False))
        if ended and work > ended[1]:
            found[ended[0]] = (*found[ended[0]][:3], True)
        work += bool(i.cycles or i.opcode == "while" or i.kernel)
    return found


def _held(program: Program, computation: Computation, i: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    """Collectives that one instruction is or holds, each with the computation around it."""
    if i.opcode.removesuffix("-start") in KINDS:
        yield computation, i
    for callee in [program.computations[name] for name in i.calls] if i.opcode in ("fusion", "async-start") else ():
        for part in callee.instructions.values():
            yield from _held(program, callee, part)


def _kind_and_payload(holder: Computation, c: Instruction, size: int) -> tuple[str, int, int]:
    kind, operands = c.opcode.removesuffix("-start"), c.operands[: 1 if c.opcode.startswith("collective-permute") else None]
    arrays = [array for name in operands for array in holder.instructions[name].arrays]
    payload = sum(math.prod(dims) * int((re.findall(r"\d+", element) or [8])[0]) // 8 for element, dims in arrays)
    scatters = kind == "all-reduce" and holder.name.startswith("all-reduce-scatter")
    return "reduce-scatter" if scatters else kind, size, payload * (size if kind == "all-gather" else 1)


def _group_size(c: Instruction, devices: int) -> int:
    """From any of the ways to write groups: a mesh's axes, `[groups,size]<=[…]`, lists, or nothing for all devices."""
    if c.opcode.startswith("collective-permute"):
        return 2
    if mesh := c.attribute("replica_groups=mesh[", "]"):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh))
        used = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", c.attribute(f"mesh[{mesh}] {{", "}"))
        return math.prod(int(part or sizes[name]) for name, part in used)
    if shape := c.attribute("replica_groups=[", "]"):
        return int(shape.split(",")[1])
    listed = c.attribute("replica_groups={{", "}")
    return listed.count(",") + 1 if listed else devices


def estimated_cycles(program: Program, slowest: int = 12) -> Cycles:
    """Sum XLA's `estimated_cycles` as often as each operation runs."""
    total = products = repeated = 0
    kernels, cycles_of, times_of = Counter[str](), Counter[str](), Counter[str]()
    for computation in program.computations.values():
        runs, visits = program.runs[computation.name], program.visits[computation.name]
        for i in computation.instructions.values():
            if i.kernel and runs:
                kernels[i.kernel] += runs
            if computation.name not in program.inner and runs and (cycles := i.cycles):
                total, repeated = total + cycles * runs, repeated + cycles * (runs - visits)
                products += cycles * runs * _is_product(program, i)
                operation = f"{i.op_name} {i.type.lstrip('(').partition('{')[0]}"
                cycles_of[operation] += cycles * runs
                times_of[operation] += runs
    most = tuple((f"{operation} ×{times_of[operation]}", float(cycles)) for operation, cycles in cycles_of.most_common(slowest))
    return Cycles(total, products, repeated, dict(kernels), most)


def _is_product(program: Program, i: Instruction) -> bool:
    parts = (part for name in i.calls if i.opcode == "fusion" for part in program.computations[name].instructions.values())
    return i.opcode in PRODUCTS or any(_is_product(program, part) for part in parts)


def repeated_flops(program: Program) -> int:
    """FLOPs of every run of a loop's body but the first, which XLA's count leaves out: two for each multiply-add of a matrix product, as
    `HloCostAnalysis` counts (openxla/xla, xla/service/hlo_cost_analysis.cc). Elementwise work and Pallas kernels are not in it."""
    return sum(
        _flops(computation, i) * (program.runs[computation.name] - program.visits[computation.name])
        for computation in program.computations.values()
        for i in computation.instructions.values()
        if i.opcode in PRODUCTS and program.runs[computation.name] > program.visits[computation.name]
    )


def _flops(computation: Computation, i: Instruction) -> int:
    left, right = (computation.instructions[name].arrays[0][1] for name in i.operands)
    result = i.arrays[0][1]
    if i.opcode == "dot":
        return 2 * math.prod(result) * math.prod(left[int(d)] for d in i.attribute("lhs_contracting_dims={", "}").split(",") if d)
    # XLA:TPU turns batch dimensions into a dilated window's: most positions of it meet no element, and these are no multiplications.
    sides = zip(re.split("_|->", i.attribute("dim_labels=")), (left, right, result), strict=True)
    data, kernel, out = (dict(zip(label, dims, strict=True)) for label, dims in sides)
    window = dict(part.split("=") for part in i.attribute("window={", "}").split())
    total = 2 * data["b"] * kernel["i"] * kernel["o"] // int(i.attribute("batch_group_count=") or 1)
    for d in (label for label in kernel if label.isdigit()):
        stride, dilate, spread, pad = (
            int(window[key].split("x")[int(d)].split("_")[0]) if key in window else default
            for key, default in (("stride", 1), ("rhs_dilate", 1), ("lhs_dilate", 1), ("pad", 0))
        )
        places = (o * stride + k * dilate - pad for o in range(out[d]) for k in range(kernel[d]))
        total *= sum(place % spread == 0 and 0 <= place // spread < data[d] for place in places)
    return total

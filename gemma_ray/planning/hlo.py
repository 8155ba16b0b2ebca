"""Reads the optimised program that XLA:TPU writes as text: `program = parse(compiled.as_text())`, then ask.

Every answer sums over instructions, each as often as its computation runs: once, times the trips of the loops around it (XLA's own totals
count a loop's body once). Branches of a conditional all count. Sizes are one device's, without the padding of tiles. XLA:TPU's dialect:
a matrix product is a `convolution`, mostly in a fusion; a reduce-scatter is an all-reduce in an `all-reduce-scatter*`; a collective
beside other work is `KIND-start` and `KIND-done`, or a fusion ending in the custom call `AsyncCollectiveStart`, products that carry it along
and a fusion ending in `AsyncCollectiveDone`, all on one channel.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
PRODUCTS = ("convolution", "dot")
LARGEST_ESTIMATE = 1 << 50  # cycles, six days of them; XLA writes numbers near 2^63 where it has no estimate

_OPCODE, _NAME, _WORD = re.compile(r" ([a-z][a-z0-9-]*)\("), re.compile(r"%([\w.-]+)"), re.compile(r"[\w.>-]*")
_CALLS = ("calls=%", "body=%", "condition=%", "true_computation=%", "false_computation=%")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation; `type` is the result's, `inside` what stands in the parentheses, `attributes` all after them."""

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    inside: str
    attributes: str

    def attribute(self, key: str, end: str = "") -> str:
        """What follows `key`, as far as `end` or the end of the word; '' when there is no such key."""
        start = self.attributes.find(key) + len(key)
        if start < len(key):
            return ""
        return self.attributes[start : self.attributes.find(end, start)] if end else (_WORD.match(self.attributes, start) or [""])[0]

    @property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """Element type and dimensions of the result, or of each part of a tuple."""
        return [(kind, tuple(int(d.strip("<=")) for d in dims.split(",") if d)) for kind, dims in _ARRAY.findall(self.type)]

    @property
    def calls(self) -> list[str]:
        """Computations that run when this runs; the scalar functions of reductions and sorts are none."""
        keys = ("to_apply=%",) if self.opcode == "call" else _CALLS
        return [name for key in keys if (name := self.attribute(key))] + _NAME.findall(self.attribute("branch_computations={", "}"))

    @property
    def op_name(self) -> str:
        """JAX's name of the operation, or the instruction's own."""
        return self.attribute('op_name="', '"') or self.name

    @property
    def cycles(self) -> int:
        """XLA's estimate for one run, 0 where it has none."""
        value = int(self.attribute('"estimated_cycles":"') or 0)
        return value if 0 < value < LARGEST_ESTIMATE else 0

    @property
    def kernel(self) -> str:
        """Name of the Pallas kernel that this calls, '' when it calls none."""
        return re.sub(r"\.\d+$", "", self.name) if self.attribute('custom_call_target="') == "tpu_custom_call" else ""

    @property
    def constant(self) -> int | None:
        """Value of an integer constant."""
        return int(self.inside) if self.opcode == "constant" and re.fullmatch(r"-?\d+", self.inside) else None


@dataclass(frozen=True, slots=True)
class Computation:
    """Instructions by name, in the order in which they run."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    def source(self, name: str) -> Instruction:
        """What produced a value, seen through copies."""
        found = self.instructions[name]
        while found.opcode in ("copy", "bitcast", "convert", "copy-start", "copy-done"):
            found = self.instructions[found.operands[0]]
        return found


@dataclass(frozen=True, slots=True)
class Loop:
    """A `while`, which the program reaches `entered` times. `trips` is None when the text does not say; the body then counts once."""

    name: str
    body: str
    op_name: str
    trips: int | None
    entered: int


@dataclass(frozen=True, slots=True)
class Program:
    """Computations by name, callees first; how often each runs (`runs`), or would with each loop's body run once, as XLA counts (`visits`);
    and which are part of one instruction of another, of a fusion or an `async-start` (`inner`)."""

    computations: dict[str, Computation]
    loops: tuple[Loop, ...]
    runs: Counter[str]
    visits: Counter[str]
    inner: frozenset[str]
    devices: int


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


def parse(text: str) -> Program:
    """Read a program, in one pass over its lines."""
    computations: dict[str, Computation] = {}
    name, lines = "", list[str]()
    for line in text.splitlines():
        if line.endswith("{") and line.startswith(("%", "ENTRY ")):
            name, lines = _NAME.findall(line)[0], []
        elif line == "}" and name:
            parsed = [_instruction(line) for line in lines]
            root = next((i for i, line in zip(parsed, lines, strict=True) if line.startswith("  ROOT")), parsed[-1])
            computations[name], name = Computation(name, {i.name: i for i in parsed}, root), ""
        elif line.startswith("  ") and " = " in line:
            lines.append(line)
        elif lines:
            lines[-1] += line  # an attribute with a line break in it
    counts = re.findall(r"(?:replica_count|num_partitions)=(\d+)", text[: text.find("\n")])
    return _counted(computations, math.prod(map(int, counts)))


def _instruction(line: str) -> Instruction:
    """`[ROOT ]%name = type opcode(operands), attributes`; types have parentheses too, but none after a space and a word."""
    name, opcode = _NAME.search(line), _OPCODE.search(line)
    if name is None or opcode is None:
        raise ValueError(f"not an instruction of a compiled program: {line[:200]}")
    end = line.find(")", opcode.end())
    while line.count("(", opcode.end(), end) > line.count(")", opcode.end(), end):
        end = line.find(")", end + 1)
    inside = line[opcode.end() : end]
    return Instruction(name[1], opcode[1], line[name.end() + 3 : opcode.start()], tuple(_NAME.findall(inside)), inside, line[end + 1 :])


def _counted(computations: dict[str, Computation], devices: int) -> Program:
    """Count how often each computation runs, from the entry down: XLA writes callees before callers, the entry last."""
    runs, visits, inner, loops = Counter[str](), Counter[str](), set[str](), list[Loop]()
    entry = next(reversed(computations))
    runs[entry] = visits[entry] = 1
    for computation in reversed(computations.values()):
        for i in computation.instructions.values():
            trips = None
            if i.opcode == "while":
                trips = _trips(computations, computation, i)
                loops.append(Loop(i.name, i.attribute("body=%"), i.op_name, trips, runs[computation.name]))
            for callee in i.calls:
                runs[callee] += runs[computation.name] * (1 if trips is None else trips)
                visits[callee] += visits[computation.name]
                if computation.name in inner or i.opcode in ("fusion", "async-start"):
                    inner.add(callee)
    return Program(computations, tuple(loops), runs, visits, frozenset(inner), devices)


def _trips(computations: dict[str, Computation], around: Computation, loop: Instruction) -> int | None:
    """XLA's own count where it wrote one, else from `counter < constant`; the counter goes from 0 by 1, as JAX's do, or as written."""
    if known := loop.attribute('"known_trip_count":{"n":"'):
        return int(known)
    condition, update = computations[loop.attribute("condition=%")], computations[loop.attribute("body=%")]
    sides = [condition.source(name) for name in condition.root.operands] if condition.root.opcode == "compare" else []
    if [side.opcode for side in sides] != ["get-tuple-element", "constant"] or (limit := sides[1].constant) is None:
        return None
    index, initial, step = int(sides[0].attribute("index=")), around.source(loop.operands[0]), 1
    start = around.source(initial.operands[index]).constant if initial.opcode == "tuple" else None
    added = update.source(update.root.operands[index])
    if added.opcode == "add":
        step = next((value for name in added.operands if (value := update.source(name).constant)), 1)
    distance = limit - (start or 0) + (condition.root.attribute("direction=") == "LE")
    return max(0, math.ceil(distance / step))


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
                    pending[channel if target else i.name] = (len(found), work)
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

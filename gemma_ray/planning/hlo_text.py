"""XLA:TPU's text of an optimised program as dataclasses, with how often each computation runs; `gemma_ray.planning.hlo` asks of them."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

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
    added = update.source(update.root.operands[index]) if update.root.opcode == "tuple" else None
    if added and added.opcode == "add":
        step = next((value for name in added.operands if (value := update.source(name).constant)), 1)
    distance = limit - (start or 0) + (condition.root.attribute("direction=") == "LE")
    return max(0, math.ceil(distance / step))

"""What a family of modules is: a grid of parameters, and for each point its ports, its request in words, its Verilog and its golden model.

    grid point          {"op": "AND", "width": 8}
    request             "The module should implement the bitwise AND of a and b."      words, from templates
    module              assign y = a & b;                                              Verilog
    golden model        {"a": 12, "b": 10} → {"y": 8}                                  Python, which the Verilog is checked against

A family is one entry of a table (`families.FAMILIES`). Its texts are short and regular: they are what a model of two million parameters
learns from in a few hundred steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import Template
from typing import Any, Literal

from gemma_ray.data.verilog.golden import CLOCK, Model, Params
from gemma_ray.data.verilog.timing import EDGES, RESETS, timing_sentence

PREAMBLE = "Implement a module named TopModule with this interface. Ports are one bit unless specified."


@dataclass(frozen=True)
class Port:
    """A port of a module; `width` in bits, `reg` for an output that an always block drives."""

    direction: Literal["input", "output"]
    name: str
    width: int = 1
    reg: bool = False

    @property
    def declaration(self) -> str:
        """`output reg [7:0] q`."""
        kind = f"{self.direction} reg" if self.reg else self.direction
        return f"{kind} {vector(self.width)}{self.name}"

    @property
    def listed(self) -> str:
        """`output q (8 bits)`, as the prompt lists it."""
        return f"{self.direction:<6} {self.name}" + (f" ({self.width} bits)" if self.width > 1 else "")


@dataclass(frozen=True)
class Family:
    """One family of modules.

    Args:
      name: lower-case words joined by underscores; part of held-out problems' file names.
      grid: every parameter and the values it takes, two parameters or more (see `split`). `edge` and `reset` are the clock edge and the
        reset of `timing`, and bring their ports and their sentence with them.
      inputs, outputs: of a point; the clock and the reset are added.
      requests: sentences that complete "The module should …"; `$parameter` and the names of `terms` are filled in, as in `reasoning`.
      reasoning: one or two sentences on how the answer follows.
      body: the Verilog between the port list and `endmodule`, lines unindented.
      model: made by `golden.combinational` or `golden.clocked`.
      terms: further words for the templates.
      valid: whether a point of the grid is wanted.
      cycles: clock cycles without a reset that show the whole behaviour.
      state: what a reset clears, as the request calls it.
    """

    name: str
    grid: Mapping[str, Sequence[int | str]]
    inputs: Callable[[Params], Sequence[Port]]
    outputs: Callable[[Params], Sequence[Port]]
    requests: Sequence[str]
    reasoning: str
    body: Callable[[Params], str]
    model: Model
    terms: Callable[[Params], Mapping[str, object]] = lambda p: {}
    valid: Callable[[Params], bool] = lambda p: True
    cycles: Callable[[Params], int] = lambda p: 12
    state: str = "q"

    @property
    def clocked(self) -> bool:
        """Whether its modules have a clock."""
        return "edge" in self.grid

    @cached_property
    def points(self) -> tuple[Params, ...]:
        """Every valid point, in the grid's order."""
        points = (dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values()))
        return tuple(point for point in points if self.valid(point))

    def ports(self, p: Params) -> tuple[Port, ...]:
        """All ports of a point in order: clock, reset, inputs, outputs."""
        timing = [Port("input", CLOCK)] if self.clocked else []
        if p.get("reset", "none") != "none":
            timing.append(Port("input", str(p["reset"])))
        return (*timing, *self.inputs(p), *self.outputs(p))

    def prompt(self, p: Params, phrasing: int) -> str:
        """The request, laid out as VerilogEval's spec-to-rtl prompts: preamble, list of ports, what the module should do."""
        ports = "\n".join(f" - {port.listed}" for port in self.ports(p))
        return f"{PREAMBLE}\n\n{ports}\n\nThe module should {self._purpose(p, phrasing)}"

    def comment(self, p: Params, phrasing: int) -> str:
        """The header that a source file could have: ports and purpose, two comment lines."""
        ports = ", ".join(" ".join(port.listed.split()) for port in self.ports(p))
        return f"// {ports}\n// {self._purpose(p, phrasing)}"

    def explanation(self, p: Params) -> str:
        """The reasoning before the answer."""
        return self._fill(self.reasoning, p)

    def module(self, p: Params, name: str = "TopModule") -> str:
        """The Verilog of a point, ending with `endmodule` and no line break."""
        ports = ",\n".join(f"  {port.declaration}" for port in self.ports(p))
        body = "\n".join(f"  {line}" for line in self.body(p).splitlines())
        return f"module {name} (\n{ports}\n);\n{body}\nendmodule"

    def _purpose(self, p: Params, phrasing: int) -> str:
        request = self._fill(self.requests[phrasing], p)
        return f"{request} {timing_sentence(p, self.state)}" if self.clocked else request

    def _fill(self, template: str, p: Params) -> str:
        return Template(template).substitute({**p, **self.terms(p)})


def inp(name: str, width: Any = 1) -> Port:
    """An input of `width` bits."""
    return Port("input", name, int(width))


def out(name: str, width: Any = 1) -> Port:
    """An output of `width` bits that an assign drives."""
    return Port("output", name, int(width))


def out_reg(name: str, width: Any = 1) -> Port:
    """An output of `width` bits that an always block drives."""
    return Port("output", name, int(width), reg=True)


def vector(width: int) -> str:
    """`[7:0] ` for 8 bits, nothing for one bit."""
    return f"[{width - 1}:0] " if width > 1 else ""


def literal(width: Any, value: Any) -> str:
    """`8'd5`. Requests write constants as the answer does: the mark before the digits shows which number to copy."""
    return f"{width}'d{value}"


def check_family(family: Family) -> None:
    """Raise ValueError when a table entry is not one that the rest can work with."""
    if len(family.grid) < 2:
        raise ValueError(f"family {family.name}: a grid needs two parameters, or no point can be held out while its values are trained on")
    if "reset" in family.grid and not family.clocked:
        raise ValueError(f"family {family.name}: a reset needs an edge")
    for parameter, known in (("edge", EDGES), ("reset", (*RESETS, "none"))):
        if unknown := set(family.grid.get(parameter, ())) - set(known):
            raise ValueError(f"family {family.name}: {parameter} {sorted(unknown)} is none of {', '.join(known)}")

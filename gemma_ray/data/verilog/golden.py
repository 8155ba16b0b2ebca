"""Golden models: what a module's outputs must be, computed in Python from its inputs.

A model maps a point of the grid and a sequence of input vectors to expected outputs. Time runs alike in every bench:

    vector      0         1         2         3          inputs change here, never at a clock edge
    clk       ______|‾‾‾‾‾‾‾‾‾|_________|‾‾‾‾‾‾‾‾‾|___   vector 0 sees a rising edge, 1 a falling one, and so on
    samples       0  1      2  3      4  5      6  7     a clocked module is sampled before and after each edge

so a wrong edge shows after an odd vector, and a reset that should or should not wait for the clock shows before an edge.
A module without a clock is sampled once a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gemma_ray.data.verilog.timing import RESETS

CLOCK = "clk"

Params = Mapping[str, Any]
"""A point of a family's grid: parameter → int or str."""
Vector = Mapping[str, int]
"""Values of a module's inputs, the clock left out."""
Expected = Mapping[str, int] | None
"""Values that a module's outputs must have; None while they are unknown (before the first reset or load)."""
Model = Callable[[Params, Sequence[Vector]], list[Expected]]


def combinational(function: Callable[[Params, Vector], Mapping[str, int]]) -> Model:
    """A model whose outputs depend on the present inputs only; one sample a vector."""

    def model(p: Params, vectors: Sequence[Vector]) -> list[Expected]:
        return [function(p, x) for x in vectors]

    return model


def clocked(
    step: Callable[[Params, Any, Vector], Any],
    outputs: Callable[[Params, Any, Vector], Expected] = lambda p, state, x: {"q": state},
) -> Model:
    """A model with a state: 0 by the point's reset, `step` at its clock edge; two samples a vector.

    Without a reset the first state is None (unknown): `step` gets it, and must not look into it.
    """

    def model(p: Params, vectors: Sequence[Vector]) -> list[Expected]:
        reset = RESETS.get(str(p.get("reset", "none")))
        state: Any = None
        expected: list[Expected] = []
        for number, x in enumerate(vectors):
            in_reset = reset is not None and x[p["reset"]] == reset.active
            if reset and reset.asynchronous and in_reset:
                state = 0
            expected.append(None if state is None else outputs(p, state, x))
            if p["edge"] == ("posedge" if number % 2 == 0 else "negedge"):
                if in_reset:
                    state = 0
                elif reset is None or state is not None:
                    state = step(p, state, x)
            expected.append(None if state is None else outputs(p, state, x))
        return expected

    return model


def bits(width: Any) -> int:
    """The largest value of `width` bits, which is also their mask."""
    return (1 << int(width)) - 1

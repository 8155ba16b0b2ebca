"""Clock edges and resets: how a request words them, how Verilog writes them, and when they act."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EDGES = {"posedge": "rising", "negedge": "falling"}
"""Verilog's word for a clock edge → a request's word."""


@dataclass(frozen=True)
class Reset:
    """A reset input: whether it acts without the clock, and the level at which it does."""

    asynchronous: bool
    active: int


RESETS = {"reset": Reset(False, 1), "resetn": Reset(False, 0), "areset": Reset(True, 1), "aresetn": Reset(True, 0)}
"""Port name → reset. The name says the kind, as in much published RTL."""


def timing_sentence(p: Mapping[str, int | str], state: str) -> str:
    """The edge, and what the reset does to `state`."""
    sentence = f"Use the {EDGES[str(p['edge'])]} edge of clk."
    if reset := RESETS.get(str(p.get("reset", "none"))):
        kind = "asynchronous" if reset.asynchronous else "synchronous"
        sentence += f" {p['reset']} is {kind}, active {'high' if reset.active else 'low'}, and clears {state}."
    return sentence


def always(p: Mapping[str, int | str], target: str, value: str, *, when: str | None = None) -> str:
    """An always block that sets `target` to `value` at the clock edge (`when` a condition holds), and to 0 by the point's reset."""
    name = str(p.get("reset", "none"))
    reset = RESETS.get(name)
    events = [f"{p['edge']} clk"]
    if reset and reset.asynchronous:
        events.append(f"{'posedge' if reset.active else 'negedge'} {name}")
    update = f"if ({when}) {target} <= {value};" if when else f"{target} <= {value};"
    lines = [f"always @({' or '.join(events)})"]
    if reset:
        lines += [f"  if ({name if reset.active else '!' + name}) {target} <= 0;", f"  else {update}"]
    else:
        lines.append(f"  {update}")
    return "\n".join(lines)

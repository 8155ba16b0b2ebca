"""Families with a clock: registers, counters, shift registers, edge detectors, small state machines."""

from __future__ import annotations

from gemma_ray.data.verilog.family import Family, inp, literal, out, out_reg, vector
from gemma_ray.data.verilog.golden import Params, Vector, bits, clocked
from gemma_ray.data.verilog.timing import EDGES, RESETS, always

_TIMING = {"edge": tuple(EDGES), "reset": tuple(RESETS)}

# kind: Verilog of a and last, value of both
_CHANGES = {
    "rose": ("a & ~last", lambda a, last: a & ~last),
    "fell": ("~a & last", lambda a, last: ~a & last),
    "changed": ("a ^ last", lambda a, last: a ^ last),
}


def _register(p: Params, state: int | None, x: Vector) -> int | None:
    return x["d"] if x.get("en", 1) else state


def _modulo(p: Params, state: int, x: Vector) -> int:
    return (state + 1) % p["n"] if x.get("en", 1) else state


def _last(p: Params) -> str:
    return literal((p["n"] - 1).bit_length(), p["n"] - 1)


def _limit(p: Params) -> str:
    return literal(p["limit"].bit_length(), p["limit"])


def _shift(p: Params, state: int, x: Vector) -> int:
    if p["direction"] == "left":
        return (state << 1 | x["d"]) & bits(p["width"])
    return state >> 1 | x["d"] << (p["width"] - 1)


def _shift_value(p: Params) -> str:
    top = p["width"] - 1
    return f"{{q[{top - 1}:0], d}}" if p["direction"] == "left" else f"{{d, q[{top}:1]}}"


def _sequence_body(p: Params) -> str:
    length = len(p["pattern"])
    older = "last[0]" if length == 2 else f"last[{length - 2}:0]"
    update = always(p, "last", f"{{{older}, d}}")
    return f"reg [{length - 1}:0] last;\n{update}\nassign y = last == {length}'b{p['pattern']};"


def _delay_body(p: Params) -> str:
    stages = [f"d{i}" for i in range(1, p["cycles"])]
    moves = "\n".join(f"  {to} <= {source};" for source, to in zip(["d", *stages], [*stages, "q"], strict=True))
    return f"reg {vector(p['width'])}{', '.join(stages)};\nalways @({p['edge']} clk) begin\n{moves}\nend"


def _delay(p: Params, state: tuple[int, ...] | None, x: Vector) -> tuple[int, ...] | None:
    return (*(state or ()), x["d"])[-p["cycles"] :]


CLOCKED: tuple[Family, ...] = (
    Family(
        name="register",
        grid={"width": (1, 2, 3, 4, 5, 6, 7, 8, 9, 16), "enable": ("no", "yes"), "edge": tuple(EDGES), "reset": ("none", *RESETS)},
        inputs=lambda p: (*([inp("en")] if p["enable"] == "yes" else []), inp("d", p["width"])),
        outputs=lambda p: (out_reg("q", p["width"]),),
        requests=("implement a register that loads d into q$when.", "store d in q$when.", "load q from d$when."),
        reasoning="q takes d at the clock edge$when.",
        terms=lambda p: {"when": " when en is 1" if p["enable"] == "yes" else ""},
        body=lambda p: always(p, "q", "d", when="en" if p["enable"] == "yes" else None),
        model=clocked(_register),
    ),
    Family(
        name="counter",
        grid={"direction": ("up", "down"), "width": range(2, 10), **_TIMING},
        inputs=lambda p: (),
        outputs=lambda p: (out_reg("q", p["width"]),),
        requests=(
            "implement a counter that counts $direction by 1 each cycle.",
            "count $direction by 1 each cycle on q.",
            "be a counter q that goes $direction by 1.",
        ),
        reasoning="q goes $direction by 1 and wraps by its width.",
        body=lambda p: always(p, "q", f"q {'+' if p['direction'] == 'up' else '-'} 1"),
        model=clocked(lambda p, state, x: (state + (1 if p["direction"] == "up" else -1)) & bits(p["width"])),
        cycles=lambda p: min(1 << p["width"], 64) + 6,
    ),
    Family(
        name="modulo_counter",
        grid={"n": range(3, 11), "enable": ("no", "yes"), **_TIMING},
        inputs=lambda p: [inp("en")] if p["enable"] == "yes" else [],
        outputs=lambda p: (out_reg("q", (p["n"] - 1).bit_length()),),
        requests=(
            "count from 0 to $last, then from 0 again$when.",
            "implement a counter that wraps to 0 after $last$when.",
            "count on q from 0 to $last and wrap$when.",
        ),
        reasoning="At $last the next value is 0, else q + 1.",
        terms=lambda p: {"last": _last(p), "when": ", only when en is 1" if p["enable"] == "yes" else ""},
        body=lambda p: always(p, "q", f"(q == {_last(p)}) ? 0 : q + 1", when="en" if p["enable"] == "yes" else None),
        model=clocked(_modulo),
        cycles=lambda p: 2 * p["n"] + 8,
    ),
    Family(
        name="limit_counter",
        grid={"limit": range(2, 10), **_TIMING},
        inputs=lambda p: (),
        outputs=lambda p: (out_reg("q", p["limit"].bit_length()),),
        requests=(
            "count up from 0 and stop at $constant.",
            "implement a counter that stops at $constant.",
            "count up on q until it is $constant, then hold.",
        ),
        reasoning="Below $constant q goes up by 1, at $constant it holds.",
        terms=lambda p: {"constant": _limit(p)},
        body=lambda p: always(p, "q", "q + 1", when=f"q < {_limit(p)}"),
        model=clocked(lambda p, state, x: min(state + 1, p["limit"])),
        cycles=lambda p: p["limit"] + 6,
    ),
    Family(
        name="accumulator",
        grid={"op": ("add", "subtract"), "width": range(3, 10), **_TIMING},
        inputs=lambda p: (inp("a", p["width"]),),
        outputs=lambda p: (out_reg("q", p["width"]),),
        requests=("$words each cycle.", "implement an accumulator: $words each cycle.", "accumulate in q: $words at every clock edge."),
        reasoning="The next q comes from q and a: $words.",
        terms=lambda p: {"words": "add a to q" if p["op"] == "add" else "subtract a from q"},
        body=lambda p: always(p, "q", f"q {'+' if p['op'] == 'add' else '-'} a"),
        model=clocked(lambda p, state, x: (state + (x["a"] if p["op"] == "add" else -x["a"])) & bits(p["width"])),
    ),
    Family(
        name="shift_register",
        grid={"direction": ("left", "right"), "width": (*range(3, 10), 16), **_TIMING},
        inputs=lambda p: (inp("d"),),
        outputs=lambda p: (out_reg("q", p["width"]),),
        requests=(
            "implement a shift register: q shifts $direction and d enters at the $end bit.",
            "shift q $direction by one each cycle, with d as the new $end bit.",
        ),
        reasoning="Shifting $direction drops one bit and puts d at the $end bit.",
        terms=lambda p: {"end": "lowest" if p["direction"] == "left" else "highest"},
        body=lambda p: always(p, "q", _shift_value(p)),
        model=clocked(_shift),
        cycles=lambda p: p["width"] + 8,
    ),
    Family(
        name="edge_detector",
        grid={"kind": tuple(_CHANGES), "width": (*range(1, 10), 16), "edge": tuple(EDGES)},
        inputs=lambda p: (inp("a", p["width"]),),
        outputs=lambda p: (out("y", p["width"]),),
        requests=(
            "set each bit of y where a $kind since the last clock edge.",
            "show on y which bits of a $kind since the last clock edge.",
            "detect on y the bits of a that $kind since the last clock edge.",
        ),
        reasoning="Keep the last a; a bit $kind where $verilog is 1.",
        terms=lambda p: {"verilog": _CHANGES[p["kind"]][0]},
        body=lambda p: f"reg {vector(p['width'])}last;\n{always(p, 'last', 'a')}\nassign y = {_CHANGES[p['kind']][0]};",
        model=clocked(lambda p, state, x: x["a"], lambda p, state, x: {"y": _CHANGES[p["kind"]][1](x["a"], state) & bits(p["width"])}),
    ),
    Family(
        name="toggle",
        grid={"width": range(1, 10), **_TIMING},
        inputs=lambda p: (inp("t", p["width"]),),
        outputs=lambda p: (out_reg("q", p["width"]),),
        requests=(
            "flip each bit of q when the same bit of t is 1.",
            "implement a toggle register: t flips bits of q.",
            "toggle the bits of q that are 1 in t.",
        ),
        reasoning="A bit flips by XOR with 1, so the next q is q ^ t.",
        body=lambda p: always(p, "q", "q ^ t"),
        model=clocked(lambda p, state, x: state ^ x["t"]),
    ),
    Family(
        name="delay",
        grid={"cycles": (2, 3, 4), "width": range(1, 10), "edge": tuple(EDGES)},
        inputs=lambda p: (inp("d", p["width"]),),
        outputs=lambda p: (out_reg("q", p["width"]),),
        requests=(
            "delay d by $cycles cycles.",
            "drive q with d delayed by $cycles cycles.",
            "implement a delay line from d to q of $cycles cycles.",
        ),
        reasoning="A chain of $cycles registers ends in q.",
        body=_delay_body,
        model=clocked(_delay, lambda p, state, x: {"q": state[0]} if len(state) == p["cycles"] else None),
    ),
    Family(
        name="sequence",
        grid={"pattern": tuple(f"{value:0{length}b}" for length in (2, 3) for value in range(1 << length)), **_TIMING},
        inputs=lambda p: (inp("d"),),
        outputs=lambda p: (out("y"),),
        requests=(
            "set y when the last $length samples of d were $length'b$pattern.",
            "detect the sequence $length'b$pattern on d: y is 1 after it.",
            "set y to 1 when the last $length bits from d are $length'b$pattern.",
        ),
        reasoning="Keep the last $length samples and compare them with $length'b$pattern.",
        terms=lambda p: {"length": len(p["pattern"])},
        body=_sequence_body,
        model=clocked(
            lambda p, state, x: (state << 1 | x["d"]) & bits(len(p["pattern"])),
            lambda p, state, x: {"y": int(state == int(p["pattern"], 2))},
        ),
        cycles=lambda p: 40,
        state="the samples",
    ),
    Family(
        name="set_clear",
        grid={"first": ("set", "clr"), **_TIMING},
        inputs=lambda p: (inp("set"), inp("clr")),
        outputs=lambda p: (out_reg("q"),),
        requests=("make q 1 by set and 0 by clr; $first wins if both are 1.", "hold a bit q that set sets and clr clears; $first wins."),
        reasoning="$first wins, so it is looked at first.",
        body=lambda p: always(p, "q", "set | (q & ~clr)" if p["first"] == "set" else "(set | q) & ~clr"),
        model=clocked(lambda p, q, x: x["set"] | (q & ~x["clr"]) if p["first"] == "set" else (x["set"] | q) & ~x["clr"]),
    ),
    Family(
        name="two_state",
        grid={"leave0": (0, 1), "leave1": (0, 1), **_TIMING},
        inputs=lambda p: (inp("a"), inp("b")),
        outputs=lambda p: (out_reg("q"),),
        requests=(
            "be a state machine on q: state 0 goes to 1 when a is $leave0, state 1 goes to 0 when b is $leave1.",
            "hold a state q that goes from 0 to 1 when a is $leave0 and from 1 to 0 when b is $leave1.",
        ),
        reasoning="In state 0 the next state depends on a, in state 1 on b.",
        body=lambda p: always(p, "q", f"q ? {'~b' if p['leave1'] else 'b'} : {'a' if p['leave0'] else '~a'}"),
        model=clocked(lambda p, q, x: int(x["b"] != p["leave1"]) if q else int(x["a"] == p["leave0"])),
    ),
)
"""The table; add a family by adding an entry."""

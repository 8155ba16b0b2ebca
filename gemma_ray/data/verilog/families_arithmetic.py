"""Families without a clock that calculate: sums, differences, comparisons, minimum and maximum."""

from __future__ import annotations

import operator

from gemma_ray.data.verilog.families_logic import WIDTHS
from gemma_ray.data.verilog.family import Family, inp, literal, out
from gemma_ray.data.verilog.golden import Params, bits, combinational

# name: Verilog, words, value
_RELATIONS = {
    "eq": ("==", "equal to", operator.eq),
    "ne": ("!=", "not equal to", operator.ne),
    "lt": ("<", "less than", operator.lt),
    "le": ("<=", "at most", operator.le),
    "gt": (">", "greater than", operator.gt),
    "ge": (">=", "at least", operator.ge),
}
_SUMS = {
    "sum": ("a + b", "sum of a and b", lambda a, b: a + b),
    "difference": ("a - b", "difference a minus b", lambda a, b: a - b),
    "reversed": ("b - a", "difference b minus a", lambda a, b: b - a),
    "successor": ("a + b + 1", "sum of a, b and 1", lambda a, b: a + b + 1),
}


def _constant(p: Params) -> str:
    return literal(p["width"], p["value"])


ARITHMETIC: tuple[Family, ...] = (
    Family(
        name="sum",
        grid={"kind": tuple(_SUMS), "width": WIDTHS},
        inputs=lambda p: (inp("a", p["width"]), inp("b", p["width"])),
        outputs=lambda p: (out("y", p["width"]),),
        requests=("compute the $words.", "drive y with the $words.", "implement the $words, ignoring overflow."),
        reasoning="y has $width bits and drops the carry: $verilog.",
        terms=lambda p: {"verilog": _SUMS[p["kind"]][0], "words": _SUMS[p["kind"]][1]},
        body=lambda p: f"assign y = {_SUMS[p['kind']][0]};",
        model=combinational(lambda p, x: {"y": _SUMS[p["kind"]][2](x["a"], x["b"]) & bits(p["width"])}),
    ),
    Family(
        name="adder",
        grid={"carry": ("without", "with"), "width": (1, *WIDTHS)},
        inputs=lambda p: (inp("a", p["width"]), inp("b", p["width"]), *([inp("cin")] if p["carry"] == "with" else [])),
        outputs=lambda p: (out("cout"), out("sum", p["width"])),
        requests=(
            "implement an adder of a and b $carry carry in, with carry out cout.",
            "add a and b $carry carry in; cout is the carry out.",
        ),
        reasoning="The concatenation {cout, sum} keeps the carry.",
        body=lambda p: f"assign {{cout, sum}} = a + b{' + cin' if p['carry'] == 'with' else ''};",
        model=combinational(
            lambda p, x: {
                "cout": (x["a"] + x["b"] + x.get("cin", 0)) >> p["width"],
                "sum": (x["a"] + x["b"] + x.get("cin", 0)) & bits(p["width"]),
            }
        ),
    ),
    Family(
        name="offset",
        grid={"op": ("add", "subtract"), "value": range(2, 10), "width": (5, 6, 7, 8, 9, 16)},
        inputs=lambda p: (inp("a", p["width"]),),
        outputs=lambda p: (out("y", p["width"]),),
        requests=("$words.", "drive y with the result: $words.", "$words and output the result on y."),
        reasoning="$width bits hold the result, overflow is dropped.",
        terms=lambda p: {"words": f"add {_constant(p)} to a" if p["op"] == "add" else f"subtract {_constant(p)} from a"},
        body=lambda p: f"assign y = a {'+' if p['op'] == 'add' else '-'} {_constant(p)};",
        model=combinational(lambda p, x: {"y": (x["a"] + (p["value"] if p["op"] == "add" else -p["value"])) & bits(p["width"])}),
    ),
    Family(
        name="compare",
        grid={"relation": tuple(_RELATIONS), "width": WIDTHS},
        inputs=lambda p: (inp("a", p["width"]), inp("b", p["width"])),
        outputs=lambda p: (out("y"),),
        requests=("set y to 1 when a is $words b, else 0.", "compare a and b: y is 1 if a is $words b.", "tell whether a is $words b."),
        reasoning="The numbers are unsigned, so y is a $verilog b.",
        terms=lambda p: {"verilog": _RELATIONS[p["relation"]][0], "words": _RELATIONS[p["relation"]][1]},
        body=lambda p: f"assign y = a {_RELATIONS[p['relation']][0]} b;",
        model=combinational(lambda p, x: {"y": int(_RELATIONS[p["relation"]][2](x["a"], x["b"]))}),
    ),
    Family(
        name="threshold",
        grid={"relation": tuple(_RELATIONS), "value": range(2, 10), "width": (4, 5, 6, 7, 8, 16)},
        inputs=lambda p: (inp("a", p["width"]),),
        outputs=lambda p: (out("y"),),
        requests=(
            "set y to 1 when a is $words $constant, else 0.",
            "compare a with $constant: y is 1 if a is $words $constant.",
            "tell whether a is $words $constant.",
        ),
        reasoning="The number is unsigned, so y is a $verilog $constant.",
        terms=lambda p: {
            "constant": _constant(p),
            "verilog": _RELATIONS[p["relation"]][0],
            "words": _RELATIONS[p["relation"]][1],
        },
        body=lambda p: f"assign y = a {_RELATIONS[p['relation']][0]} {_constant(p)};",
        model=combinational(lambda p, x: {"y": int(_RELATIONS[p["relation"]][2](x["a"], p["value"]))}),
    ),
    Family(
        name="extreme",
        grid={"kind": ("minimum", "maximum"), "width": WIDTHS},
        inputs=lambda p: (inp("a", p["width"]), inp("b", p["width"])),
        outputs=lambda p: (out("y", p["width"]),),
        requests=("output the $kind of a and b.", "drive y with the $kind of a and b.", "compute the unsigned $kind of a and b."),
        reasoning="Compare a and b and pick the $kind.",
        body=lambda p: f"assign y = (a {'<' if p['kind'] == 'minimum' else '>'} b) ? a : b;",
        model=combinational(lambda p, x: {"y": (min if p["kind"] == "minimum" else max)(x["a"], x["b"])}),
    ),
)
"""The table; add a family by adding an entry."""

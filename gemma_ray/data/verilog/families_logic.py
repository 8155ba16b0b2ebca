"""Families without a clock that move and combine bits: gates, multiplexers, decoders, reductions, slices, shifts, extensions."""

from __future__ import annotations

from gemma_ray.data.verilog.family import Family, inp, literal, out
from gemma_ray.data.verilog.golden import Params, Vector, bits, combinational

WIDTHS = (2, 3, 4, 5, 6, 7, 8, 9, 16, 32)
"""Few and mostly of one digit, so that each is seen often enough to learn that 8 bits are [7:0]."""

# name: Verilog of a and b, value of a and b (masked afterwards)
_GATES = {
    "AND": ("a & b", lambda a, b: a & b),
    "OR": ("a | b", lambda a, b: a | b),
    "XOR": ("a ^ b", lambda a, b: a ^ b),
    "NAND": ("~(a & b)", lambda a, b: ~(a & b)),
    "NOR": ("~(a | b)", lambda a, b: ~(a | b)),
    "XNOR": ("~(a ^ b)", lambda a, b: ~(a ^ b)),
}
_SYMBOLS = {"AND": "&", "OR": "|", "XOR": "^"}

# name: Verilog of a, value of a in width w (masked afterwards), words
_UNARY = {
    "complement": ("~a", lambda a: ~a, "bitwise complement of a"),
    "negation": ("-a", lambda a: -a, "two's complement negation of a"),
    "increment": ("a + 1", lambda a: a + 1, "increment of a by 1"),
    "decrement": ("a - 1", lambda a: a - 1, "decrement of a by 1"),
    "gray": ("a ^ (a >> 1)", lambda a: a ^ (a >> 1), "Gray code of the binary number a"),
}


def _two_gates(p: Params, x: Vector) -> dict[str, int]:
    gate = {"AND": int.__and__, "OR": int.__or__, "XOR": int.__xor__}
    return {"y": gate[p["outer"]](gate[p["inner"]](x["a"], x["b"]), x["c"])}


def _reduction(p: Params, x: Vector) -> dict[str, int]:
    of = {"AND": x["a"] == bits(p["width"]), "OR": x["a"] != 0, "XOR": x["a"].bit_count() % 2 == 1}
    return {"y": int(of[p["op"]] != (p["result"] == "inverted"))}


def _decoder(p: Params, x: Vector) -> dict[str, int]:
    one_hot = 1 << x["sel"] if x.get("en", 1) else 0
    return {"y": one_hot if p["active"] == "high" else one_hot ^ bits(1 << p["bits"])}


def _decoder_body(p: Params) -> str:
    value = "en ? 1 << sel : 0" if p["enable"] == "yes" else "1 << sel"
    return f"assign y = {value};" if p["active"] == "high" else f"assign y = ~({value});"


def _rotate(p: Params, x: Vector) -> dict[str, int]:
    width, left = p["width"], p["by"] if p["direction"] == "left" else p["width"] - p["by"]
    return {"y": (x["a"] << left | x["a"] >> (width - left)) & bits(width)}


def _rotate_body(p: Params) -> str:
    width, by = p["width"], p["by"]
    if p["direction"] == "left":
        low = f"a[{width - 1}:{width - by}]" if by > 1 else f"a[{width - 1}]"
        return f"assign y = {{a[{width - 1 - by}:0], {low}}};"
    high = f"a[{by - 1}:0]" if by > 1 else "a[0]"
    return f"assign y = {{{high}, a[{width - 1}:{by}]}};"


def _reverse(p: Params, x: Vector) -> dict[str, int]:
    value = sum((x["a"] >> i & 1) << (p["width"] - 1 - i) for i in range(p["width"]))
    return {"y": value if p["result"] == "plain" else value ^ bits(p["width"])}


def _reverse_body(p: Params) -> str:
    listed = ", ".join(f"a[{i}]" for i in range(p["width"]))
    return f"assign y = {'' if p['result'] == 'plain' else '~'}{{{listed}}};"


def _extension_body(p: Params) -> str:
    filling = f"a[{p['width'] - 1}]" if p["kind"] == "sign" else "1'b0"
    return f"assign y = {{{{{p['upper']}{{{filling}}}}}, a}};"


def _extension(p: Params, x: Vector) -> dict[str, int]:
    sign = x["a"] >> (p["width"] - 1) if p["kind"] == "sign" else 0
    return {"y": x["a"] | (sign * bits(p["upper"])) << p["width"]}


LOGIC: tuple[Family, ...] = (
    Family(
        name="gate",
        grid={"op": tuple(_GATES), "width": (1, *WIDTHS)},
        inputs=lambda p: (inp("a", p["width"]), inp("b", p["width"])),
        outputs=lambda p: (out("y", p["width"]),),
        requests=(
            "implement the bitwise $op of a and b.",
            "drive y with a $op b, bit by bit.",
            "apply $op to each pair of bits of a and b.",
        ),
        reasoning="Each bit of y is the $op of the same bits of a and b: $verilog.",
        terms=lambda p: {"verilog": _GATES[p["op"]][0]},
        body=lambda p: f"assign y = {_GATES[p['op']][0]};",
        model=combinational(lambda p, x: {"y": _GATES[p["op"]][1](x["a"], x["b"]) & bits(p["width"])}),
    ),
    Family(
        name="two_gates",
        grid={"inner": tuple(_SYMBOLS), "outer": tuple(_SYMBOLS), "width": (1, *WIDTHS)},
        inputs=lambda p: tuple(inp(name, p["width"]) for name in "abc"),
        outputs=lambda p: (out("y", p["width"]),),
        requests=(
            "implement (a $inner b) $outer c, bit by bit.",
            "drive y with (a $inner b) $outer c.",
            "combine a $inner b with c by $outer on each bit.",
        ),
        reasoning="First a $inner b, then $outer with c.",
        body=lambda p: f"assign y = (a {_SYMBOLS[p['inner']]} b) {_SYMBOLS[p['outer']]} c;",
        model=combinational(_two_gates),
    ),
    Family(
        name="unary",
        grid={"op": tuple(_UNARY), "width": WIDTHS},
        inputs=lambda p: (inp("a", p["width"]),),
        outputs=lambda p: (out("y", p["width"]),),
        requests=("implement the $words.", "drive y with the $words.", "compute the $words."),
        reasoning="y has the width of a. The $words is $verilog.",
        terms=lambda p: {"verilog": _UNARY[p["op"]][0], "words": _UNARY[p["op"]][2]},
        body=lambda p: f"assign y = {_UNARY[p['op']][0]};",
        model=combinational(lambda p, x: {"y": _UNARY[p["op"]][1](x["a"]) & bits(p["width"])}),
    ),
    Family(
        name="mux2",
        grid={"one": ("a", "b"), "width": (1, *WIDTHS)},
        inputs=lambda p: (inp("sel"), inp("a", p["width"]), inp("b", p["width"])),
        outputs=lambda p: (out("y", p["width"]),),
        requests=(
            "implement a 2-to-1 multiplexer: y is $one when sel is 1, else $zero.",
            "select $one when sel is 1 and $zero when sel is 0.",
            "drive y with $one if sel is 1, else with $zero.",
        ),
        reasoning="sel at 1 picks $one, sel at 0 picks $zero.",
        terms=lambda p: {"zero": "b" if p["one"] == "a" else "a"},
        body=lambda p: f"assign y = sel ? {p['one']} : {'b' if p['one'] == 'a' else 'a'};",
        model=combinational(lambda p, x: {"y": x["a"] if x["sel"] == (p["one"] == "a") else x["b"]}),
    ),
    Family(
        name="mux4",
        grid={"order": ("abcd", "dcba", "badc", "cdab"), "width": (1, 2, 3, 4, 8)},
        inputs=lambda p: (inp("sel", 2), *(inp(name, p["width"]) for name in "abcd")),
        outputs=lambda p: (out("y", p["width"]),),
        requests=(
            "implement a 4-to-1 multiplexer: sel 0, 1, 2, 3 picks $listed.",
            "select $listed when sel is 0, 1, 2, 3.",
        ),
        reasoning="sel[1] picks the pair, sel[0] picks within it.",
        terms=lambda p: {"listed": ", ".join(p["order"])},
        body=lambda p: "assign y = sel[1] ? (sel[0] ? {3} : {2}) : (sel[0] ? {1} : {0});".format(*p["order"]),
        model=combinational(lambda p, x: {"y": x[p["order"][x["sel"]]]}),
    ),
    Family(
        name="override",
        grid={"value": range(10), "width": (4, 5, 6, 7, 8, 9, 16)},
        inputs=lambda p: (inp("sel"), inp("a", p["width"])),
        outputs=lambda p: (out("y", p["width"]),),
        requests=(
            "drive y with the constant $constant when sel is 1, else with a.",
            "replace a by $constant when sel is 1.",
            "pass a, or $constant if sel is 1.",
        ),
        reasoning="sel at 1 picks the constant $constant, sel at 0 picks a.",
        terms=lambda p: {"constant": literal(p["width"], p["value"])},
        body=lambda p: f"assign y = sel ? {literal(p['width'], p['value'])} : a;",
        model=combinational(lambda p, x: {"y": p["value"] if x["sel"] else x["a"]}),
    ),
    Family(
        name="decoder",
        grid={"bits": (2, 3, 4, 5), "enable": ("no", "yes"), "active": ("high", "low")},
        inputs=lambda p: (inp("sel", p["bits"]), *([inp("en")] if p["enable"] == "yes" else [])),
        outputs=lambda p: (out("y", 1 << p["bits"]),),
        requests=(
            "implement a decoder of sel, outputs active $active$when.",
            "decode sel: only bit sel of y is $level$unless.",
        ),
        reasoning="Shifting 1 left by sel sets bit sel; outputs are active $active.",
        terms=lambda p: {
            "level": int(p["active"] == "high"),
            "when": ", with enable en" if p["enable"] == "yes" else "",
            "unless": ", none when en is 0" if p["enable"] == "yes" else "",
        },
        body=_decoder_body,
        model=combinational(_decoder),
    ),
    Family(
        name="reduction",
        grid={"op": tuple(_SYMBOLS), "result": ("plain", "inverted"), "width": WIDTHS},
        inputs=lambda p: (inp("a", p["width"]),),
        outputs=lambda p: (out("y"),),
        requests=(
            "implement the $op of all bits of a$inverted.",
            "reduce a to one bit by $op$inverted.",
            "drive y with the $op reduction of a$inverted.",
        ),
        reasoning="The reduction operator $symbol joins all bits of a.",
        terms=lambda p: {
            "symbol": ("~" if p["result"] == "inverted" else "") + _SYMBOLS[p["op"]],
            "inverted": ", inverted" if p["result"] == "inverted" else "",
        },
        body=lambda p: f"assign y = {'' if p['result'] == 'plain' else '~'}{_SYMBOLS[p['op']]}a;",
        model=combinational(_reduction),
    ),
    Family(
        name="slice",
        grid={"high": range(2, 9), "low": range(7), "width": (8, 9, 16)},
        valid=lambda p: p["low"] < p["high"] < p["width"],
        inputs=lambda p: (inp("a", p["width"]),),
        outputs=lambda p: (out("y", p["high"] - p["low"] + 1),),
        requests=("select a[$high:$low].", "drive y with bits a[$high:$low].", "output the field a[$high:$low] of a."),
        reasoning="The field is a[$high:$low].",
        body=lambda p: f"assign y = a[{p['high']}:{p['low']}];",
        model=combinational(lambda p, x: {"y": x["a"] >> p["low"] & bits(p["high"] - p["low"] + 1)}),
    ),
    Family(
        name="shift",
        grid={"direction": ("left", "right"), "by": range(1, 6), "width": (6, 7, 8, 9, 16, 32)},
        inputs=lambda p: (inp("a", p["width"]),),
        outputs=lambda p: (out("y", p["width"]),),
        requests=(
            "shift a $direction by $by.",
            "drive y with a shifted $direction by $by, filling with 0.",
            "implement a $direction shift of a by $by.",
        ),
        reasoning="A $direction shift by $by fills with zeros.",
        body=lambda p: f"assign y = a {'<<' if p['direction'] == 'left' else '>>'} {p['by']};",
        model=combinational(
            lambda p, x: {"y": (x["a"] << p["by"]) & bits(p["width"]) if p["direction"] == "left" else x["a"] >> p["by"]},
        ),
    ),
    Family(
        name="rotate",
        grid={"direction": ("left", "right"), "by": (1, 2, 3), "width": (7, 8, 9, 16)},
        inputs=lambda p: (inp("a", p["width"]),),
        outputs=lambda p: (out("y", p["width"]),),
        requests=(
            "rotate a $direction by $by.",
            "drive y with a rotated $direction by $by.",
            "implement a $direction rotation of a by $by.",
        ),
        reasoning="The $by bits shifted out on the $direction come back on the other side.",
        body=_rotate_body,
        model=combinational(_rotate),
    ),
    Family(
        name="reverse",
        grid={"result": ("plain", "inverted"), "width": range(3, 9)},
        inputs=lambda p: (inp("a", p["width"]),),
        outputs=lambda p: (out("y", p["width"]),),
        requests=("reverse the order of the bits of a$inverted.", "drive y with the bits of a in reverse order$inverted."),
        reasoning="Bit 0 of a comes first.",
        terms=lambda p: {"inverted": ", inverted" if p["result"] == "inverted" else ""},
        body=_reverse_body,
        model=combinational(_reverse),
    ),
    Family(
        name="extension",
        grid={"kind": ("sign", "zero"), "upper": range(2, 6), "width": (2, 3, 4, 8)},
        inputs=lambda p: (inp("a", p["width"]),),
        outputs=lambda p: (out("y", p["width"] + p["upper"]),),
        requests=(
            "implement the $kind extension of a by $upper bits.",
            "extend a by $upper upper bits that hold $filling.",
            "widen a by $upper bits with $kind extension.",
        ),
        reasoning="The $upper upper bits hold $filling, the rest is a.",
        terms=lambda p: {"filling": "its top bit" if p["kind"] == "sign" else "zeros"},
        body=_extension_body,
        model=combinational(_extension),
    ),
)
"""The table; add a family by adding an entry."""

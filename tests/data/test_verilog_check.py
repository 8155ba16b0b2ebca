"""Answers against golden models in Icarus Verilog, and held-out benches against wrong answers."""

import dataclasses
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from gemma_ray.data.verilog.bench import problem
from gemma_ray.data.verilog.families import FAMILIES
from gemma_ray.data.verilog.family import Family
from gemma_ray.data.verilog.golden import Params, clocked, combinational
from gemma_ray.data.verilog.icarus import check_modules, icarus_version, run_bench
from gemma_ray.data.verilog.split import point_key, split
from gemma_ray.errors import StageError, ToolError

pytestmark = pytest.mark.skipif(shutil.which("iverilog") is None, reason="Icarus Verilog is not installed")
EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)

# Wrong variants by rewriting: what a model that has half learnt writes.
REWRITES = {
    "other edge": (r"posedge clk|negedge clk", lambda m: "negedge clk" if m.group().startswith("pos") else "posedge clk"),
    "other reset level": (r"if \((!?)(a?resetn?)\)", lambda m: f"if ({'' if m.group(1) else '!'}{m.group(2)})"),
    "reset waits for the clock": (r" or (pos|neg)edge a?resetn?", lambda m: ""),
    "reset does not wait for the clock": (
        r"edge clk\)(\s+if \((!?)(resetn?)\))",
        lambda m: f"edge clk or {'neg' if m[2] else 'pos'}edge {m[3]}){m[1]}",
    ),
    "resets to 1": (r"<= 0;", lambda m: "<= 1;"),
    "output one bit wider": (r"output( reg)? \[(\d+):0\]", lambda m: f"output{m.group(1) or ''} [{int(m.group(2)) + 1}:0]"),
    "output one bit narrower": (r"output( reg)? \[(\d+):0\]", lambda m: f"output{m.group(1) or ''} [{int(m.group(2)) - 1}:0]"),
    "inverted": (r"assign (\w+) = (.*);", lambda m: f"assign {m.group(1)} = ~({m.group(2)});"),
    "enable ignored": (r"if \(en\) ", lambda m: ""),
}


def passes(log: str) -> bool:
    """VerilogEval's rule, once the compiler has passed."""
    return "TIMEOUT" not in log and re.search(r"^Mismatches: 0 in [1-9]\d* samples$", log, re.MULTILINE) is not None


def neighbours(family: Family, p: Params) -> list[Params]:
    """Points that differ from `p` in one parameter: for every parameter the values beside its own."""
    keys = {point_key(family, other) for other in family.points}
    found = []
    for parameter, values in family.grid.items():
        at = list(values).index(p[parameter])
        beside = [{**p, parameter: list(values)[i]} for i in (at - 1, at + 1) if 0 <= i < len(values)]
        found += [other for other in beside if point_key(family, other) in keys]
    return found


def test_every_module_of_every_family_equals_its_golden_model():
    points = [(family, p) for family in FAMILIES.values() for p in family.points]
    assert check_modules(points) > 50 * len(points)


@EACH_FAMILY
def test_held_out_benches_pass_their_reference_and_fail_wrong_answers(family: Family):
    """Every rewrite that applies and every neighbouring point's module must fail; the reference must compile without a word."""
    for p in split(family).heldout[:2]:
        made = problem(1, family, p, 0)
        warnings, log = run_bench(made.answer, made.reference, made.bench)
        assert warnings == ""
        assert passes(log), log
        wrong = {f"{name} in {point_key(family, p)}": re.sub(old, new, made.answer) for name, (old, new) in REWRITES.items()}
        wrong |= {f"{point_key(family, other)} for {point_key(family, p)}": family.module(other) for other in neighbours(family, p)}
        wrong = {name: text for name, text in wrong.items() if text != made.answer}
        assert len(wrong) >= 3
        with ThreadPoolExecutor(2) as pool:
            logs = dict(zip(wrong, pool.map(lambda text: run_bench(text, made.reference, made.bench)[1], wrong.values()), strict=True))  # noqa: B023
        assert [name for name, log in logs.items() if passes(log)] == []


def test_a_module_unlike_its_golden_model_is_an_error_that_names_it():
    family = FAMILIES["gate"]
    wrong = dataclasses.replace(family, model=combinational(lambda p, x: {"y": x["a"] & x["b"] if p["op"] != "XOR" else x["a"] | x["b"]}))
    p = {"op": "XOR", "width": 8}
    with pytest.raises(StageError, match=r"gate:op=XOR,width=8: its Verilog differs from its golden model at sample \d+"):
        check_modules([(wrong, {"op": "AND", "width": 8}), (wrong, p)])


def test_a_reset_of_the_wrong_kind_is_seen_by_the_golden_model():
    family = FAMILIES["toggle"]
    wrong = dataclasses.replace(family, body=lambda p: re.sub(r" or posedge areset", "", family.body(p)))
    with pytest.raises(StageError, match="toggle:width=4,edge=posedge,reset=areset: its Verilog differs"):
        check_modules([(wrong, {"width": 4, "edge": "posedge", "reset": "areset"})])


def test_a_module_that_does_not_compile_cleanly_is_an_error_that_names_it():
    family = FAMILIES["gate"]
    for body in ("assign y = a &;", "assign y = c;", "assign z = a;"):
        wrong = dataclasses.replace(family, body=lambda p, body=body: body)
        with pytest.raises(StageError, match="gate:op=OR,width=3: its Verilog does not compile cleanly"):
            check_modules([(family, {"op": "AND", "width": 2}), (wrong, {"op": "OR", "width": 3})])


def test_a_golden_model_counts_by_hand():
    """A modulo-3 counter with an asynchronous reset: worked by hand, vector by vector, before and after each edge."""
    model = FAMILIES["modulo_counter"].model
    p = {"n": 3, "enable": "no", "edge": "posedge", "reset": "areset"}
    resets = [0, 1, 0, 0, 0, 0, 0, 1]
    got = [None if sample is None else sample["q"] for sample in model(p, [{"areset": level} for level in resets])]
    assert got == [None, None, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0]


def test_a_register_without_a_reset_is_unknown_until_it_loads():
    model = clocked(lambda p, state, x: x["d"] if x["en"] else state)
    p = {"edge": "posedge", "reset": "none"}
    vectors = [{"en": 0, "d": 1}, {"en": 1, "d": 1}, {"en": 1, "d": 1}, {"en": 0, "d": 0}]
    assert model(p, vectors) == [None, None, None, None, None, {"q": 1}, {"q": 1}, {"q": 1}]


def test_without_a_simulator_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolError, match=r"apt-get install iverilog.*brew install icarus-verilog"):
        icarus_version()

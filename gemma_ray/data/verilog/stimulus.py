"""Input vectors that tell a right module from a wrong one: every combination when there are few, else the telling ones and random ones.

They depend on the point alone, so a module and a held-out bench of the same point see the same vectors.
"""

from __future__ import annotations

import itertools
import random

from gemma_ray.data.verilog.family import Family, Port
from gemma_ray.data.verilog.golden import CLOCK, Params, Vector, bits
from gemma_ray.data.verilog.split import point_key
from gemma_ray.data.verilog.timing import RESETS

_EXHAUSTIVE_BITS = 7
_RANDOM_VECTORS = 48


def stimulus(family: Family, p: Params) -> list[Vector]:
    """The vectors of a point, each a value for every input but the clock."""
    inputs = [port for port in family.ports(p) if port.direction == "input" and port.name != CLOCK]
    rng = random.Random(point_key(family, p))
    if family.clocked:
        return _clocked(family, p, inputs, rng)
    if sum(port.width for port in inputs) <= _EXHAUSTIVE_BITS:
        ranges = (range(1 << port.width) for port in inputs)
        return [dict(zip((port.name for port in inputs), values, strict=True)) for values in itertools.product(*ranges)]
    return [*_telling(p, inputs, rng), *(_random(inputs, rng) for _ in range(_RANDOM_VECTORS))]


def _random(inputs: list[Port], rng: random.Random) -> dict[str, int]:
    return {port.name: rng.getrandbits(port.width) for port in inputs}


def _telling(p: Params, inputs: list[Port], rng: random.Random) -> list[Vector]:
    """Corners, single bits, constants of the point and their neighbours, and inputs that are equal or one apart."""
    vectors: list[Vector] = [{port.name: fill & bits(port.width) for port in inputs} for fill in (0, -1)]
    constants = {value + near for value in p.values() if isinstance(value, int) for near in (-1, 0, 1)}
    for port in inputs:
        values = {0, bits(port.width), *(1 << i for i in range(port.width)), *constants}
        vectors += [{**_random(inputs, rng), port.name: value} for value in sorted(values) if 0 <= value <= bits(port.width)]
    for one, other in itertools.combinations(inputs, 2):
        if one.width == other.width:
            for near in (-1, 0, 0, 1):
                vector = _random(inputs, rng)
                vectors.append({**vector, other.name: (vector[one.name] + near) & bits(one.width)})
    return vectors


def _clocked(family: Family, p: Params, inputs: list[Port], rng: random.Random) -> list[Vector]:
    """In reset, then long enough without it to show the behaviour, then with resets at random half cycles.

    Inputs change every half cycle, so the wrong clock edge reads other values than the right one. An enable is mostly on.
    """
    name = str(p.get("reset", "none"))
    undisturbed = 2 * family.cycles(p)
    vectors = []
    for number in range(4 + undisturbed + _RANDOM_VECTORS):
        vector = _random(inputs, rng)
        if "en" in vector:
            vector["en"] = int(rng.random() < 0.85)
        if name in RESETS:
            resets = number < 3 or (number >= 4 + undisturbed and rng.random() < 0.2)
            vector[name] = RESETS[name].active if resets else 1 - RESETS[name].active
        vectors.append(vector)
    return vectors

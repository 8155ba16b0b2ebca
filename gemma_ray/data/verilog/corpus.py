"""Raw Verilog to train a base model on: modules under a header comment, as source files have them.

It teaches syntax and the words that describe circuits. It holds training points only, never the name TopModule, and neither the layout of
a request nor that of an answer, so a base model trained on it cannot do the task before it is tuned.
"""

from __future__ import annotations

import random

from gemma_ray.data.verilog.families import FAMILIES
from gemma_ray.data.verilog.sampling import shuffled_rounds
from gemma_ray.data.verilog.split import split


def raw_verilog(modules: int, seed: int) -> list[str]:
    """`modules` source texts spread over all families, deterministic in `seed`; each one commented module ending with a line break."""
    rng = random.Random(f"raw:{seed}")
    pools = [[(family, p, i) for p in split(family).training for i in range(len(family.requests))] for family in FAMILIES.values()]
    return [
        f"{family.comment(p, phrasing)}\n{family.module(p, family.name)}\n" for family, p, phrasing in shuffled_rounds(pools, modules, rng)
    ]

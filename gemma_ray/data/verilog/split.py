"""Which points of a family's grid are trained on, and which are held out.

A held-out point is a combination that no training text shows, of values that each occur in training: `8 bits` with other operators and
`XOR` with other widths, but not the 8-bit XOR. The split depends on the family alone, not on a seed, so that two data sets never
train on each other's problems.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass

from gemma_ray.data.verilog.family import Family
from gemma_ray.data.verilog.golden import Params

HELDOUT_SHARE = 0.18
_LARGEST_SHARE_OF_A_VALUE = 0.5


@dataclass(frozen=True)
class Split:
    """A family's points, in an order that the hash of each decides."""

    training: tuple[Params, ...]
    heldout: tuple[Params, ...]


def point_key(family: Family, p: Params) -> str:
    """`gate:op=AND,width=8`: names a point in messages, hashes and summaries."""
    return f"{family.name}:" + ",".join(f"{parameter}={value}" for parameter, value in p.items())


def split(family: Family) -> Split:
    """Hold out about `HELDOUT_SHARE` of the points, and of the points that share a value at most half."""
    ordered = sorted(family.points, key=lambda p: hashlib.sha256(point_key(family, p).encode()).digest())
    having = Counter(item for p in ordered for item in p.items())
    held: Counter[tuple[str, object]] = Counter()
    training, heldout = [], []
    wanted = max(1, round(HELDOUT_SHARE * len(ordered)))
    for p in ordered:
        if len(heldout) < wanted and all(held[item] + 1 <= _LARGEST_SHARE_OF_A_VALUE * having[item] for item in p.items()):
            heldout.append(p)
            held.update(p.items())
        else:
            training.append(p)
    return Split(tuple(training), tuple(heldout))

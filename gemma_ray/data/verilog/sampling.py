"""Drawing from several pools fairly: every pool equally often, every member of a pool once before any is drawn again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def shuffled_rounds(pools: Sequence[Sequence[T]], count: int, rng: random.Random) -> list[T]:
    """`count` members: round after round one of each pool, the pools in a new order each round."""
    draws = [_endless(pool, rng) for pool in pools]
    drawn: list[T] = []
    while len(drawn) < count:
        drawn += [next(draw) for draw in rng.sample(draws, len(draws))]
    return drawn[:count]


def _endless(pool: Sequence[T], rng: random.Random) -> Iterator[T]:
    while True:
        yield from rng.sample(pool, len(pool))

"""LoRA dropout's random numbers, which Qwix looks for where a jitted model has none.

Qwix 0.1.8 draws them from `qwix_rngs` of the current module (qwix/_src/utils/flax_util.py, `make_rng`): a counter that changes during a
forward pass, which neither rematerialisation nor a scan over micro-batches allows, and that a checkpoint would have to hold. Here a key comes
from the run's seed, the optimizer's step and the micro-batch, and from how many projections came before: a resumed run draws the same
numbers, on any number of devices. Outside `dropout_key` nothing is dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import qwix
from qwix._src.utils import flax_util

_active: list[bool] = []


class LoraProvider(qwix.LoraProvider):
    """Qwix's, which drops inputs inside `dropout_key` alone."""

    def _get_current_rule_and_op_id(self, *args: Any, **kwargs: Any) -> Any:
        rule, op_id = super()._get_current_rule_and_op_id(*args, **kwargs)
        return (replace(rule, dropout=0.0) if isinstance(rule, qwix.LoraRule) and not _active else rule), op_id


@contextmanager
def dropout_key(key: jax.Array | None) -> Iterator[None]:
    """Draw from `key` for the block, which traces one forward pass; with None nothing is dropped."""
    if key is None:
        yield
        return
    numbers = itertools.count()
    _active.append(True)
    try:
        with mock.patch.object(flax_util, "make_rng", lambda _: jax.random.fold_in(key, next(numbers))):
            yield
    finally:
        _active.pop()

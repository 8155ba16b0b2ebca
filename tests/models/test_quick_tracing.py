"""The private place that `quick_tracing` patches is there, and still costs what the work-around saves."""

from __future__ import annotations

import inspect

import jax
from jax._src.interpreters import partial_eval

from gemma_ray.models.quick_tracing import quick_tracing


def test_errors_of_tracers_still_walk_the_program_upstream() -> None:
    """Fails when JAX no longer does: remove the work-around then."""
    assert "_origin_msg" in vars(partial_eval.DynamicJaxprTracer)
    assert "eqns" in inspect.getsource(partial_eval.DynamicJaxprTracer._origin_msg)


def test_the_text_is_left_out_inside_and_back_outside() -> None:
    seen = []

    def function(x: jax.Array) -> jax.Array:
        y = x + 1
        seen.append(y._origin_msg())  # type: ignore[attr-defined]
        return y

    with quick_tracing():
        jax.eval_shape(function, 1.0)
    jax.eval_shape(function, 1)  # another type, or JAX remembers the first
    assert seen[0] == ""
    assert seen[1] != ""

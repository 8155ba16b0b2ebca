"""Work-around: building a model under `nnx.eval_shape` takes time quadratic in its layers.

nnx and Qwix ask every variable for `.sharding`; on a tracer that raises, and JAX composes the error's text by walking the whole jaxpr.
With the text left out, 60 layers with LoRA take seconds instead of minutes. The place is jax._src.interpreters.partial_eval
(DynamicJaxprTracer._origin_msg), private: `tests/models/test_quick_tracing.py` fails when it moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def quick_tracing() -> Iterator[None]:
    """Leave the origin out of tracer errors."""
    from jax._src.interpreters import partial_eval

    with mock.patch.object(partial_eval.DynamicJaxprTracer, "_origin_msg", lambda self: ""):
        yield

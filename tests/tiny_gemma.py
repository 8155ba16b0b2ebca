"""A tiny random Gemma 4 with its tokenizer, and data for it, made once a test session: what the tests of several packages start from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gemma_ray.models.gemma4 import PRESETS
from gemma_ray.models.tiny import write_initial_model
from gemma_ray.models.tokenizer import train_tokenizer

TEXTS = [
    "Implement a module named TopModule with this interface.\n - input  a (8 bits)\n - output y\n",
    "module TopModule (\n  input [7:0] a,\n  output y\n);\n  assign y = ^a;\nendmodule\n",
]


FAMILIES = tuple(PRESETS)
"""A tiny model of each of Gemma 4's structures: 31B's, E2B's, E4B's, 26B-A4B's."""


SHORT: dict[str, dict[str, int]] = {
    "gemma4-tiny": {"num_hidden_layers": 2, "global_every": 2},
    "gemma4-tiny-e2b": {"num_hidden_layers": 4, "global_every": 2, "num_kv_shared_layers": 2},
    "gemma4-tiny-e4b": {"num_hidden_layers": 4, "global_every": 2, "num_kv_shared_layers": 2},
    "gemma4-tiny-26b-a4b": {"num_hidden_layers": 2, "global_every": 2},
}
"""The same structures in the fewest layers, for tests that compile a backward pass."""

QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""XLA's options for a program that runs once: compiling takes a third of the time."""


def some_slow(*by_default: str) -> list[Any]:
    """Parameters of a test of each family, `slow` but for those named."""
    return [name if name in by_default else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


def write_tiny_gemma(folder: Path, preset: str = "gemma4-tiny", **sizes: int) -> Path:
    """Hugging Face files of a built-in preset, with other sizes where given, and seeded random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(TEXTS, PRESETS[preset]["vocab_size"], folder)
    with mock.patch.dict(PRESETS, {preset: {**PRESETS[preset], **sizes}}):
        write_initial_model(preset, folder, seed=0)
    return folder


def write_uneven_gemma(folder: Path, preset: str, **sizes: int) -> Path:
    """The same with norms and scales that are not all one, so that one in the wrong place shows.

    Norms of queries and keys are small: unscaled scores of random weights would be so sharp that fp32 is not enough to compare models.
    """
    write_tiny_gemma(folder, preset, **sizes)
    random = np.random.default_rng(1)

    def uneven(name: str, tensor: np.ndarray) -> np.ndarray:
        if tensor.ndim > 1:
            return tensor
        return (tensor * random.uniform(0.5, 1.5, tensor.shape) * (0.4 if "q_norm" in name or "k_norm" in name else 1)).astype(np.float32)

    return rewrite_tensors(folder, lambda tensors: {name: uneven(name, tensor) for name, tensor in tensors.items()})


def rewrite_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Path:
    """The folder, its tensors replaced by what `change` makes of them."""
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})
    return folder

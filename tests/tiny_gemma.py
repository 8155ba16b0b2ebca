"""A tiny random Gemma 4 with its tokenizer, and data for it, made once a test session: what the tests of several packages start from."""

from __future__ import annotations

from pathlib import Path

from gemma_ray.models.gemma4 import PRESETS
from gemma_ray.models.tiny import write_initial_model
from gemma_ray.models.tokenizer import train_tokenizer

TEXTS = [
    "Implement a module named TopModule with this interface.\n - input  a (8 bits)\n - output y\n",
    "module TopModule (\n  input [7:0] a,\n  output y\n);\n  assign y = ^a;\nendmodule\n",
]


def write_tiny_gemma(folder: Path) -> Path:
    """Hugging Face files of the built-in preset with seeded random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(TEXTS, PRESETS["gemma4-tiny"]["vocab_size"], folder)
    write_initial_model("gemma4-tiny", folder, seed=0)
    return folder

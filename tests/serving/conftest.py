"""Tiny Gemma 4 models with a word tokenizer of their own, as vLLM reads them."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from gemma_ray.models.gemma4 import PRESETS
from gemma_ray.models.tiny import write_initial_model

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %} <|turn> {{ message['role'] }} {{ message['content'] }} <turn|>{% endfor %}"
    "{% if add_generation_prompt %} <|turn> model{% endif %}"
)


def write_model(folder: Path, seed: int) -> Path:
    """A tiny Gemma 4 with random weights and a tokenizer of 1,024 words in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_initial_model("gemma4-tiny", folder, seed)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "user", "model"]
    words += [f"w{i}" for i in range(PRESETS["gemma4-tiny"]["vocab_size"] - len(words))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        additional_special_tokens=["<|turn>", "<turn|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "base", seed=1)


@pytest.fixture(scope="session")
def other_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tuned", seed=2)


@pytest.fixture(scope="session")
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def tiny_model_copy(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))

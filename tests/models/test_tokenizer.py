"""The tokenizer and the chat format, against transformers' own reading of the same files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gemma_ray.errors import ModelError
from gemma_ray.models.templates import FORMATS, Conversation, chat_format, render, render_prompt, tokenize
from gemma_ray.models.tokenizer import SPECIAL_TOKENS, Tokenizer

CONVERSATIONS = [
    Conversation("Make an 8-bit adder.", "```verilog\nmodule TopModule;\nendmodule\n```"),
    Conversation("  spaces around \n", "\n answer \n", system="Be brief."),
    Conversation("é 日本 \t tabs", "ünïcode ✓ 🚀", reasoning="First\n  think.\n"),
    Conversation("x", "", system="s", reasoning="r"),
    Conversation("12345 a+b==c", "1\n\n\n2", reasoning="99"),
]


@pytest.fixture(scope="module")
def transformers_tokenizer(tiny_gemma: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_gemma, local_files_only=True)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_tokens_and_mask_are_those_of_transformers_with_generation_markers(
    tiny_gemma: Path, transformers_tokenizer: Any, conversation: Conversation
) -> None:
    theirs = transformers_tokenizer.apply_chat_template(
        conversation.messages(), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = tokenize(Tokenizer(tiny_gemma), render(FORMATS["gemma4"], conversation))
    assert ids == theirs["input_ids"]
    assert mask == [bool(bit) for bit in theirs["assistant_masks"]]
    assert any(mask)


def test_the_end_of_turn_bears_loss_and_reasoning_does_not(tiny_gemma: Path) -> None:
    tokenizer = Tokenizer(tiny_gemma)
    ids, mask = tokenize(tokenizer, render(FORMATS["gemma4"], Conversation("q", "answer", reasoning="because", system="s")))
    assert tokenizer.decode([i for i, bears in zip(ids, mask, strict=True) if bears]) == "answer<turn|>"


def test_the_prompt_is_what_the_endpoint_renders(tiny_gemma: Path, transformers_tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    theirs = transformers_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert render_prompt(FORMATS["gemma4"], "Why?", "Be brief.") == theirs


@pytest.mark.parametrize("text", ["", "plain", "a  b\n\n   c", "日本 ✓ \x00\x7f", "[31:0] q <= ~d;", "  leading", "▁"])
def test_every_text_survives_encoding(tiny_gemma: Path, text: str) -> None:
    tokenizer = Tokenizer(tiny_gemma)
    expected = text.replace("▁", " ")
    assert tokenizer.decode(tokenizer.encode(text).ids) == expected


def test_ids_are_those_that_the_model_config_counts_on(tiny_gemma: Path) -> None:
    tokenizer = Tokenizer(tiny_gemma)
    config = json.loads((tiny_gemma / "config.json").read_text())
    assert [tokenizer.special_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.size == config["vocab_size"]
    assert [tokenizer.token_text(i) for i in config["eos_token_id"]] == ["<eos>", "<turn|>"]
    assert not set(range(len(SPECIAL_TOKENS))) & set(tokenizer.ordinary_ids())


def test_a_tokenizer_without_turn_markers_is_refused(tiny_gemma: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_gemma, folder)
    text = (folder / "tokenizer.json").read_text().replace("<|turn>", "<|other>")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"no token <\|turn>"):
        chat_format(folder, "gemma4_text")


def test_another_familys_template_is_refused(tiny_gemma: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_gemma, folder)
    other = (folder / "chat_template.jinja").read_text().replace("<|turn>", "<start_of_turn>").replace("<turn|>", "<end_of_turn>")
    (folder / "chat_template.jinja").write_text(other)
    with pytest.raises(ModelError, match="start_of_turn"):
        chat_format(folder, "gemma4_text")


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_missing_or_damaged_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_an_unknown_family_names_the_known_ones(tiny_gemma: Path) -> None:
    with pytest.raises(ModelError, match="gemma4"):
        chat_format(tiny_gemma, "llama")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config.json", '{"tok', r"tokenizer_config\.json: not valid JSON"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json: does not hold an object"),
        ("tokenizer_config.json", '{"tokenizer_class": 3}', "transformers cannot read its tokenizer files"),
        ("special_tokens_map.json", "{", "transformers cannot read its tokenizer files"),
        ("chat_template.jinja", "{% if %}", r"chat_template\.jinja: the chat template does not render \(TemplateSyntaxError"),
        ("chat_template.jinja", "{{ 1 / 0 }}", r"chat_template\.jinja: the chat template does not render"),
    ],
)
def test_a_damaged_tokenizer_file_or_template_is_named(tiny_gemma: Path, tmp_path: Path, file: str, content: str, message: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_gemma, folder)
    (folder / file).write_text(content)
    with pytest.raises(ModelError, match=message):
        chat_format(folder, "gemma4_text")

"""Rendering, tokens and masks against stock chat templates: Gemma 4's five and Gemma 3's two, as the package trl ships them."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemma_ray.errors import ModelError
from gemma_ray.models.template_check import chat_format, probes_of
from gemma_ray.models.templates import (
    FORMATS,
    ChatFormat,
    Conversation,
    Loss,
    Turn,
    exchange,
    render,
    rendered_text,
    tokenize,
)
from gemma_ray.models.tokenizer import SPECIAL_TOKENS, Tokenizer

GEMMA4 = {"gemma4": "gemma4", "gemma4_v2": "gemma4, early", "gemma4_v3": "gemma4", "gemma4_v4": "gemma4", "gemma4_v5": "gemma4"}
GEMMA3 = {"gemma3": "gemma3", "gemma3_training": "gemma3"}
SHOWS_REASONING = {"gemma4_v5"}
"""The others render reasoning before tool calls alone."""

CONVERSATIONS = {
    "plain": exchange("Make an 8-bit adder.", "```verilog\nmodule TopModule;\nendmodule\n```"),
    "spaces": exchange("  spaces around \n", "\n answer \n"),
    "unicode": exchange("é 日本 \t tabs 🚀", "ünïcode ✓ 🚀"),
    "numbers": exchange("12345 a+b==c", "1\n\n\n2"),
    "empty answer": exchange("x", ""),
    "system": exchange("Why?", "Because.", system="Be brief."),
    "turns": Conversation((Turn("One?", "1"), Turn("And two?", "2"), Turn("Three?", "3")), "Count."),
    "thinking": exchange("How wide?", "8 bits", "First\n  think."),
    "thinking, system": exchange("How wide?", "8 bits", "First\n  think.", "Be brief."),
    "thinking, turns": Conversation((Turn("One?", "1", "earlier thought"), Turn("And two?", "2", "add one"))),
}


def stock_template(name: str) -> str:
    """A template by its file's name, read without importing trl."""
    found = importlib.util.find_spec("trl")
    assert found is not None, "the test environment has trl (pip install -e '.[dev]')"
    assert found.submodule_search_locations
    return (Path(found.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text()


@pytest.fixture(scope="module")
def model(tiny_gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with the markers of every format among its words."""
    folder = tmp_path_factory.mktemp("templates") / "model"
    shutil.copytree(tiny_gemma, folder)
    described = json.loads((folder / "tokenizer.json").read_text())
    unused = iter(sorted((i, word) for word, i in described["model"]["vocab"].items() if word.startswith("<unused")))
    for marker in ("<|think|>", "<start_of_turn>", "<end_of_turn>"):
        i, word = next(unused)
        del described["model"]["vocab"][word]
        described["model"]["vocab"][marker] = i
        described["added_tokens"].append({**described["added_tokens"][0], "id": i, "content": marker})
    (folder / "tokenizer.json").write_text(json.dumps(described))
    return folder


def with_template(model: Path, tmp_path: Path, name: str) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(model, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(stock_template(name))
    return folder


def stock(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def format_named(name: str) -> ChatFormat:
    return next(row for row in FORMATS if row.name == name)


def without_reasoning(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Ids less the thinking channel."""
    first, last = tokenizer.marker_id("<|channel>"), tokenizer.marker_id("<channel|>")
    return [*ids[: ids.index(first)], *ids[ids.index(last) + 1 :]] if first in ids else ids


@pytest.mark.parametrize("conversation", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize(("template", "name"), [*GEMMA4.items(), *GEMMA3.items()])
def test_tokens_are_those_of_the_stock_template(model: Path, tmp_path: Path, template: str, name: str, conversation: Conversation) -> None:
    folder = with_template(model, tmp_path, template)
    chat = chat_format(folder, "gemma4_text" if template in GEMMA4 else "gemma3_text")
    assert chat.name == name
    if conversation.thinks and chat.reasoning is None:
        with pytest.raises(ModelError, match=r"no place for reasoning; set data\.reasoning=drop"):
            render(chat, conversation)
        return
    tokenizer = Tokenizer(folder)
    (found,) = tokenize(tokenizer, [render(chat, conversation)])
    theirs = stock(folder).apply_chat_template(
        conversation.messages(), tokenize=True, return_dict=True, enable_thinking=conversation.thinks
    )["input_ids"]
    ours = found.ids.tolist()
    assert (ours if template in SHOWS_REASONING else without_reasoning(ours, tokenizer)) == theirs
    assert tokenizer.decode(found.ids[found.loss].tolist()) == conversation.turns[-1].answer.strip() + chat.close


@pytest.mark.parametrize("conversation", [CONVERSATIONS[name] for name in ("plain", "system", "turns", "spaces", "unicode")])
def test_the_assistant_mask_is_that_of_trls_gemma_3_training_template(model: Path, tmp_path: Path, conversation: Conversation) -> None:
    """Its generation markers span what the model says, the marker that ends it, and the line break after that, which nobody asks for."""
    folder = with_template(model, tmp_path, "gemma3_training")
    chat = chat_format(folder, "gemma3_text")
    theirs = stock(folder).apply_chat_template(conversation.messages(), tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    (found,) = tokenize(Tokenizer(folder), [render(chat, conversation)], "assistant")
    ids, mask, close = theirs["input_ids"], theirs["assistant_masks"], Tokenizer(folder).marker_id(chat.close)
    expected = [bool(bit) and (i == 0 or ids[i - 1] != close) for i, bit in enumerate(mask)]
    assert any(expected)
    assert (found.ids.tolist(), found.loss.tolist()) == (ids, expected)


@pytest.mark.parametrize("template", GEMMA4)
def test_stock_gemma_4_templates_have_no_mask_of_their_own(model: Path, tmp_path: Path, template: str) -> None:
    """Why the mask is made here. When this fails, upstream has markers, and the mask can be compared with them."""
    theirs = stock(with_template(model, tmp_path, template)).apply_chat_template(
        CONVERSATIONS["plain"].messages(), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert not any(theirs["assistant_masks"])


@pytest.mark.parametrize(
    ("loss", "bearing"),
    [
        ("final_answer", "2<turn|>"),
        ("assistant", "1<turn|><|channel>thought\nadd one\n<channel|>2<turn|>"),
        (
            "full",
            "<bos><|turn>system\n<|think|>\nCount.<turn|>\n<|turn>user\nOne?<turn|>\n<|turn>model\n1<turn|>\n"
            "<|turn>user\nAnd two?<turn|>\n<|turn>model\n<|channel>thought\nadd one\n<channel|>2<turn|>\n",
        ),
    ],
)
def test_each_loss_policy_by_hand(model: Path, loss: Loss, bearing: str) -> None:
    conversation = Conversation((Turn("One?", "1", "earlier"), Turn("And two?", "2", "add one")), "Count.")
    (found,) = tokenize(Tokenizer(model), [render(format_named("gemma4"), conversation)], loss)
    assert Tokenizer(model).decode(found.ids[found.loss].tolist()) == bearing


@pytest.mark.parametrize(
    ("template", "model_type", "message"),
    [("gemma3", "gemma4_text", "<start_of_turn>"), ("gemma4", "gemma3_text", r"<\|turn>"), ("qwen3", "gemma4_text", r"<\|im_start\|>")],
)
def test_markers_of_another_family_are_refused(model: Path, tmp_path: Path, template: str, model_type: str, message: str) -> None:
    with pytest.raises(ModelError, match=rf"its chat template is not gemma\d's.*{message}.*would go wrong in silence"):
        chat_format(with_template(model, tmp_path, template), model_type)


MARKERS = sorted({marker for row in FORMATS for marker in row.markers} | set(SPECIAL_TOKENS))
HOSTILE = st.lists(st.one_of(st.text(max_size=12), st.sampled_from([*MARKERS, "```verilog\n", "```", "model\n", "\n", " "])), max_size=8)
TEXT = HOSTILE.map("".join)
TURNS = st.lists(st.builds(Turn, TEXT, TEXT, st.none() | TEXT), min_size=1, max_size=3).map(tuple)


@settings(max_examples=200, deadline=None)
@given(turns=TURNS, system=st.none() | TEXT, row=st.sampled_from(FORMATS))
def test_loss_lies_within_what_the_model_says_whatever_anybody_types(
    model: Path, turns: tuple[Turn, ...], system: str | None, row: ChatFormat
) -> None:
    if row.reasoning is None:
        turns = tuple(Turn(turn.prompt, turn.answer) for turn in turns)
    conversation = Conversation(turns, system)
    tokenizer = Tokenizer(model)
    pieces = render(row, conversation)
    final, assistant, full = (tokenize(tokenizer, [pieces], loss)[0] for loss in ("final_answer", "assistant", "full"))
    assert (final.ids.tolist(), full.loss.all()) == (assistant.ids.tolist(), True)
    assert not (final.loss & ~assistant.loss).any()
    # No marker but the format's own: one that was typed is text.
    controls = {tokenizer.special_id(marker) for marker in MARKERS}
    assert [i for i in final.ids.tolist() if i in controls] == [tokenizer.marker_id(piece.text) for piece in pieces if piece.is_marker]
    # The mask is one span, from the last opening marker's role to its close.
    close = tokenizer.marker_id(row.close)
    where = np.flatnonzero(final.loss)
    assert final.ids[where[-1]] == close
    assert (np.diff(where) == 1).all()
    assert tokenizer.decode(final.ids[where].tolist()) == turns[-1].answer.strip().replace("▁", " ") + row.close
    assert int((final.ids[final.loss] == close).sum()) == 1
    assert int((assistant.ids[assistant.loss] == close).sum()) == len(turns)


@pytest.mark.parametrize("conversation", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_the_built_in_models_template_and_mask_are_ours(tiny_gemma: Path, conversation: Conversation) -> None:
    theirs = stock(tiny_gemma).apply_chat_template(
        conversation.messages(), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    chat = chat_format(tiny_gemma, "gemma4_text")
    assert chat.name == "gemma4, plain"
    (found,) = tokenize(Tokenizer(tiny_gemma), [render(chat, conversation)], "final_answer")
    assert found.ids.tolist() == theirs["input_ids"]
    if len(conversation.turns) == 1:
        assert found.loss.tolist() == [bool(bit) for bit in theirs["assistant_masks"]]


def test_the_prompt_is_what_the_endpoint_renders(model: Path, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    for template in (*GEMMA4, *GEMMA3):
        folder = with_template(model, tmp_path / template, template)
        theirs = stock(folder).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        chat = chat_format(folder, "gemma4_text" if template in GEMMA4 else "gemma3_text")
        pieces = render(chat, exchange("Why?", "", system="Be brief."))
        assert rendered_text([piece for piece in pieces[:-1] if piece.part != "answer"]) == theirs


def test_probes_cover_every_part() -> None:
    parts = {piece.part for probe in probes_of(FORMATS[0]) for piece in render(FORMATS[0], probe)}
    assert parts == {"frame", "earlier", "reasoning", "answer"}
    assert "Answer briefly.\n\nHow wide" in rendered_text(render(format_named("gemma3"), probes_of(format_named("gemma3"))[1]))

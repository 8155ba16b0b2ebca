"""The tokenizer: what it encodes, and which files it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemma_ray.errors import ModelError
from gemma_ray.models.pieces import cutter
from gemma_ray.models.template_check import chat_format
from gemma_ray.models.tokenizer import SPECIAL_TOKENS, Tokenizer


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


PIECES = st.lists(
    st.one_of(
        st.text(max_size=8), st.sampled_from(["module", " ", "  ", "\n", "\n    ", "▁", "assign y = ~a;", "<|turn>", "> </", "3'd6", "é🚀"])
    )
).map("".join)


@pytest.fixture(scope="module", params=["words", "no words", "reaching across"])
def tokenizer(request: pytest.FixtureRequest, tiny_gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The built-in tokenizer; one without a pre-tokenizer, as Gemma's; and one with a token that reaches across a space, as Gemma 3's."""
    folder = tmp_path_factory.mktemp("tokenizer")
    described = json.loads((tiny_gemma / "tokenizer.json").read_text())
    if request.param != "words":
        described["pre_tokenizer"] = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    if request.param == "reaching across":
        vocabulary, merges = described["model"]["vocab"], described["model"]["merges"]
        unused = [word for word in vocabulary if word.startswith("<unused")]
        for made, parts in {">▁": [">", "▁"], "</": ["<", "/"], ">▁</": [">▁", "</"]}.items():
            vocabulary[made] = vocabulary.pop(unused.pop())
            merges.append(parts)
    (folder / "tokenizer.json").write_text(json.dumps(described))
    return Tokenizer(folder)


@settings(max_examples=300, deadline=None)
@given(text=PIECES, data=st.data())
def test_encoding_by_pieces_is_encoding_whole(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    assert tokenizer._pieces is not None
    places = sorted(data.draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
    spans = [(places[0], places[1])]
    tokenizer._tokenizer.encode_special_tokens = True
    (expected,) = tokenizer._encode_whole([(text, spans)])
    tokenizer._tokenizer.encode_special_tokens = False
    ((ids, found),) = tokenizer.encode_text([(text, spans)])
    assert ids.tolist() == expected[0].tolist()
    assert ids[slice(*found[0])].tolist() == ids[slice(*expected[1][0])].tolist()


def test_a_token_that_reaches_across_a_space_is_found(tokenizer: Tokenizer) -> None:
    assert tokenizer._pieces is not None
    ((ids, _),) = tokenizer.encode_text([("<b> </b>", [])])
    if tokenizer._pieces.where.crossing:
        assert tokenizer._pieces.where.crossing == ">"
        assert ">▁</" in map(tokenizer.token_text, ids)


@pytest.mark.parametrize("change", [{"normalizer": None}, {"pre_tokenizer": {"type": "ByteLevel"}}, {"model": {"dropout": 0.1}}])
def test_a_tokenizer_of_another_kind_is_not_cut(tiny_gemma: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    described = json.loads((tiny_gemma / "tokenizer.json").read_text())
    changed = {key: {**described[key], **value} if key == "model" else value for key, value in change.items()}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**described, **changed}))
    assert cutter(tmp_path / "tokenizer.json", "") is None

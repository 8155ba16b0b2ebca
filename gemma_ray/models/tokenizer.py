"""Tokenizers: reading a model's own, and training the small one of the built-in model.

A tokenizer here is the `tokenizer.json` of a model folder, read by the `tokenizers` library: fast to start in a worker, and it says which
characters each token covers, which is what a loss mask is made from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gemma_ray.artifacts import file_sha256, write_json, write_text
from gemma_ray.errors import ModelError
from gemma_ray.models.pieces import Pieces, cutter

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|channel>", "<channel|>")
"""The built-in tokenizer's first ids; config.json of `gemma_ray.models.gemma4` counts on them."""

CHAT_TEMPLATE = Path(__file__).with_name("gemma4.jinja")

# A token never spans a line break and the indentation after it, a word with its leading space, a single digit, or one symbol: widths and
# constants then look the same wherever they stand, which a very small model needs.
_PIECES = r"\n▁*|▁?[A-Za-z_]+|▁?[0-9]|▁+|[^A-Za-z0-9_▁\n]"


Span = tuple[int, int]


def _cut_at(text: str, spans: Sequence[Span]) -> list[int]:
    """Places inside a text at which a span begins or ends."""
    return sorted({place for span in spans for place in span} - {0, len(text)})


def _joined(parts: list[np.ndarray], cut: list[int], spans: Sequence[Span], length: int) -> tuple[np.ndarray, list[Span]]:
    """Parts end to end, and the tokens of spans that begin and end where they were cut."""
    at = dict(zip((0, *cut, length), accumulate(map(len, parts), initial=0), strict=True))
    return np.concatenate(parts), [(at[start], at[end]) for start, end in spans]


def _within(encoding: Any, first: int, end: int) -> Span:
    """Tokens [a, b) of an encoding that lie wholly within characters [first, end)."""
    inside = [i for i, (a, b) in enumerate(encoding.offsets) if first <= a and b <= end]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


@dataclass(frozen=True)
class Encoded:
    """Token ids, and the characters [start, end) of the text that each covers."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Tokenizer:
    """A model folder's tokenizer."""

    def __init__(self, folder: Path):
        """Raises ModelError when tokenizer.json is missing or damaged."""
        import tokenizers

        self.path = folder / "tokenizer.json"
        if not self.path.is_file():
            raise ModelError(f"{folder}: no tokenizer.json; copy the tokenizer files of the model beside its weights")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(self.path))
        except Exception as e:  # the library raises bare Exception
            raise ModelError(f"{self.path}: not a tokenizer ({e}); fetch it again") from e

    @property
    def size(self) -> int:
        """Number of ids, special tokens included."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> Encoded:
        """Ids and offsets of a text that already holds its special tokens; nothing is added."""
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return Encoded(encoded.ids, encoded.offsets)

    def encode_text(self, texts: Sequence[tuple[str, Sequence[Span]]]) -> list[tuple[np.ndarray, list[Span]]]:
        """Ids (int32) of texts in which nothing is a special token, whatever it looks like. Each text comes with spans of characters
        [start, end), and its ids with the spans of tokens that lie wholly within them."""
        self._tokenizer.encode_special_tokens = True
        try:
            pieces = self._pieces
            if pieces is None:
                return self._encode_whole(texts)
            cut = [_cut_at(text, spans) for text, spans in texts]
            whole = [i for i, (text, _) in enumerate(texts) if not all(pieces.where.may_cut(text, place) for place in cut[i])]
            parts = [[text[a:b] for a, b in pairwise((0, *cut[i], len(text)))] for i, (text, _) in enumerate(texts)]
            encoded = iter(pieces.encode([part for group in parts for part in group]))
            found = [_joined([next(encoded) for _ in parts[i]], cut[i], spans, len(text)) for i, (text, spans) in enumerate(texts)]
            for i, again in zip(whole, self._encode_whole([texts[i] for i in whole]), strict=True):
                found[i] = again
            return found
        finally:
            self._tokenizer.encode_special_tokens = False

    @cached_property
    def _pieces(self) -> Pieces | None:
        where = cutter(self.path, _PIECES)
        return None if where is None else Pieces(self._tokenizer, where)

    def _encode_whole(self, texts: Sequence[tuple[str, Sequence[Span]]]) -> list[tuple[np.ndarray, list[Span]]]:
        encoded = self._tokenizer.encode_batch([text for text, _ in texts], add_special_tokens=False)
        ids = [np.array(one.ids, np.int32) for one in encoded]
        return [(ids[i], [_within(encoded[i], *span) for span in spans]) for i, (_, spans) in enumerate(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_text(self, token: int) -> str:
        """How one token is written in the vocabulary."""
        return self._tokenizer.id_to_token(token)

    def special_id(self, token: str) -> int | None:
        """The id of a token that is one piece by itself, None when the tokenizer has no such token."""
        return self._tokenizer.token_to_id(token)

    def marker_id(self, token: str) -> int:
        """The id of a token that is there. Raises ModelError when it is not."""
        found = self.special_id(token)
        if found is None:
            raise ModelError(f"{self.path}: the tokenizer has no token {token}; use the tokenizer that belongs to the model")
        return found

    def ordinary_ids(self) -> list[int]:
        """Ids of plain text: no control token, no single byte, no unused id."""
        controls = {id for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        return sorted(id for token, id in vocabulary.items() if id not in controls and not (token.startswith("<") and token.endswith(">")))

    def fingerprint(self) -> str:
        """SHA-256 of tokenizer.json, in hex."""
        return file_sha256(self.path)


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Train a BPE tokenizer with Gemma 4's turn markers on `texts` and write its files, with the chat template, into a model folder.

    Like Gemma's it writes a space as ▁ and falls back to bytes, so every text has an encoding. Deterministic in `texts`.
    Raises ModelError when the texts cannot fill the vocabulary.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(_PIECES), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *byte_tokens],
        initial_alphabet=["▁", "\n", *map(chr, range(33, 127))],
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() > vocab_size:
        raise ModelError(f"a vocabulary of {vocab_size} cannot hold the {tokenizer.get_vocab_size()} characters of the texts")
    _write_whole(_with_plain_bytes(tokenizer.to_str(), byte_tokens, vocab_size), folder)


def _with_plain_bytes(serialized: str, byte_tokens: list[str], vocab_size: int) -> dict[str, Any]:
    """The tokenizer's JSON, with byte tokens no longer special (they are ordinary words) and unused ids named, so that every id decodes."""
    described: dict[str, Any] = json.loads(serialized)
    described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] not in set(byte_tokens)]
    vocab = described["model"]["vocab"]
    vocab |= {f"<unused{i}>": i for i in range(len(vocab), vocab_size)}
    return described


def _write_whole(described: dict[str, Any], folder: Path) -> None:
    write_json(folder / "tokenizer.json", described)
    write_text(folder / "chat_template.jinja", CHAT_TEMPLATE.read_text(encoding="utf-8"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1_000_000,
        },
    )

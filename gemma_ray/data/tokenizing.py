"""Examples to tokens: rendering, the loss mask, and what is done with an example that is longer than a row."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gemma_ray.data.config import DataConfig
from gemma_ray.data.grams import SHINGLE, runs
from gemma_ray.data.schemas import Dropped, Example
from gemma_ray.models.templates import ChatFormat, Conversation, Tokens, Turn, render, tokenize
from gemma_ray.models.tokenizer import Tokenizer


@functools.lru_cache(maxsize=2)
def _tokenizer(folder: Path, fingerprint: str) -> Tokenizer:
    """One a process; the fingerprint keeps a changed file from being taken for the old one."""
    del fingerprint
    return Tokenizer(folder)


@functools.lru_cache(maxsize=2)
def _is_marker(folder: Path, fingerprint: str, markers: tuple[str, ...]) -> np.ndarray:
    """[vocabulary] bool."""
    tokenizer = _tokenizer(folder, fingerprint)
    table = np.zeros(max(tokenizer.size, *(tokenizer.marker_id(marker) + 1 for marker in markers)), bool)
    table[[tokenizer.marker_id(marker) for marker in markers]] = True
    return table


@functools.lru_cache(maxsize=64)
def _runs_of(folder: Path, fingerprint: str, text: str) -> np.ndarray:
    return runs(_tokenizer(folder, fingerprint).encode_text([(text, [])])[0][0], SHINGLE)


@dataclasses.dataclass(frozen=True)
class Tokenizing:
    """How examples become tokens. It travels to workers; the tokenizer is read there, once a process."""

    config: DataConfig
    model: Path
    fingerprint: str
    """Of the tokenizer."""
    chat: ChatFormat

    def __call__(self, examples: Sequence[Example]) -> list[Tokens | Dropped]:
        """Each example's tokens, or why it has none."""
        tokenizer = _tokenizer(self.model, self.fingerprint)
        talks = [self.conversation(example) for example in examples]
        return [self._checked(tokenizer, talk, found) for talk, found in zip(talks, self._tokenize(tokenizer, talks), strict=True)]

    def own_runs(self, example: Example, ids: np.ndarray) -> np.ndarray:
        """Runs of an example's tokens, without those of its system turn, which it may share with all others."""
        found, system = runs(ids, SHINGLE), self.conversation(example).system
        return found[~np.isin(found, _runs_of(self.model, self.fingerprint, system.strip()))] if system else found

    def conversation(self, example: Example) -> Conversation:
        """What of an example is rendered."""
        keep = self.config.reasoning == "keep"
        turns = tuple(turn if keep or turn.reasoning is None else dataclasses.replace(turn, reasoning=None) for turn in example.turns)
        return Conversation(turns, self.config.system_prompt or example.system)

    def _tokenize(self, tokenizer: Tokenizer, talks: Sequence[Conversation]) -> list[Tokens]:
        return tokenize(tokenizer, [render(self.chat, talk) for talk in talks], self.config.loss)

    def _checked(self, tokenizer: Tokenizer, talk: Conversation, found: Tokens) -> Tokens | Dropped:
        if len(found.ids) > self.config.max_seq_len:
            too_long = Dropped("too_long", f"{len(found.ids)} tokens")
            cut = self._truncated(tokenizer, talk) if self.config.too_long == "truncate" else None
            if cut is None:
                return too_long
            found = dataclasses.replace(cut, is_cut=True)
        if not found.loss.any():
            return Dropped("no_loss")
        if _is_marker(self.model, self.fingerprint, self.chat.markers)[found.ids].sum() != found.markers:
            return Dropped("marker_in_text", "the tokenizer reads a marker in its text as one")
        return found

    def _truncated(self, tokenizer: Tokenizer, talk: Conversation) -> Tokens | None:
        """The conversation with as much of the reasoning, and then of the last question, as fits; None when nothing of it would be left."""

        def with_last(**change: str | None) -> Conversation:
            return dataclasses.replace(talk, turns=(*talk.turns[:-1], dataclasses.replace(talk.turns[-1], **change)))

        def longest(text: str, cut: str, **also: None) -> Tokens | None:
            """Of the beginnings of `text`, the longest that fits, found by halving: more text is never fewer tokens, or hardly."""
            low, high, best = 1, len(text), None
            while low <= high:
                middle = (low + high) // 2
                (found,) = self._tokenize(tokenizer, [with_last(**{cut: text[:middle]}, **also)])
                if len(found.ids) <= self.config.max_seq_len:
                    low, best = middle + 1, found
                else:
                    high = middle - 1
            return best

        last: Turn = talk.turns[-1]
        if last.reasoning and (found := longest(last.reasoning, "reasoning")):
            return found
        return longest(last.prompt, "prompt", **({"reasoning": None} if last.reasoning else {}))

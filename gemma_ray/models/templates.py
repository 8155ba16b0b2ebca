"""Chat formats by model family: how a conversation becomes tokens, and which of them bear loss.

    name             a turn                           roles                 system                       reasoning
    gemma4           <|turn>ROLE⏎ … <turn|>⏎          system, user, model   a turn; <|think|>⏎ opens     <|channel>thought⏎ … ⏎<channel|>
                                                                            it when reasoning follows    before the last answer
    gemma4, early    the same                         the same              the same without ⏎           the same
    gemma4, plain    the same                         the same              a turn                       the same
    gemma3           <start_of_turn>ROLE⏎ …           user, model           stands before the first      none
                     <end_of_turn>⏎                                         user's text

    loss             part: frame   earlier answers   reasoning   last answer
    final_answer                                                      ×
    assistant                             ×              ×            ×
    full                     ×            ×              ×            ×

An answer includes the marker that closes its turn. Stock Gemma 4 templates carry no generation markers, so `return_assistant_tokens_mask`
is all zeros for them and nothing says so (huggingface/trl 6577). The mask is therefore made here, and the rendering is compared with the
model's own template (`gemma_ray.models.template_check`).

Markers become tokens by their ids; text between them is encoded as text, so that a `<turn|>` that somebody typed opens and closes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from gemma_ray.errors import ModelError
from gemma_ray.models.tokenizer import Tokenizer

Part = Literal["frame", "earlier", "reasoning", "answer"]
Loss = Literal["final_answer", "assistant", "full"]

SCOPES: tuple[Loss, ...] = ("full", "assistant", "final_answer")
"""From wide to narrow. A token's scope is the narrowest that it bears loss in, as a place in this list; it bears loss in wider ones too."""
PART_SCOPE: dict[Part, int] = {"frame": 0, "earlier": 1, "reasoning": 1, "answer": 2}


@dataclass(frozen=True)
class ChatFormat:
    """One row of the table. `think` opens the system turn when reasoning follows; `system_turn` is false where the system's text stands
    before the first user's."""

    name: str
    family: str
    """What config.json's model_type begins with."""
    bos: str
    open: str
    close: str
    markers: tuple[str, ...]
    """Tokens that the tokenizer must have as single pieces."""
    system_turn: bool = True
    think: str = ""
    reasoning: tuple[str, str] | None = None
    """What stands before and after it."""

    @cached_property
    def marker_pattern(self) -> re.Pattern[str]:
        """Finds the markers in the format's own text."""
        return re.compile("(" + "|".join(map(re.escape, self.markers)) + ")")


_GEMMA4: dict[str, Any] = {
    "family": "gemma4",
    "bos": "<bos>",
    "open": "<|turn>",
    "close": "<turn|>",
    "reasoning": ("<|channel>thought\n", "\n<channel|>"),
}
_TURNS, _CHANNEL = ("<bos>", "<|turn>", "<turn|>"), ("<|channel>", "<channel|>")

FORMATS: tuple[ChatFormat, ...] = (
    ChatFormat("gemma4", markers=(*_TURNS, *_CHANNEL, "<|think|>"), think="<|think|>\n", **_GEMMA4),
    ChatFormat("gemma4, early", markers=(*_TURNS, *_CHANNEL, "<|think|>"), think="<|think|>", **_GEMMA4),
    ChatFormat("gemma4, plain", markers=(*_TURNS, *_CHANNEL), **_GEMMA4),
    ChatFormat(
        "gemma3", "gemma3", "<bos>", "<start_of_turn>", "<end_of_turn>", ("<bos>", "<start_of_turn>", "<end_of_turn>"), system_turn=False
    ),
)


@dataclass(frozen=True)
class Turn:
    """What the user said and what the model answered. `reasoning` stands before the answer, None leaves it out."""

    prompt: str
    answer: str
    reasoning: str | None = None


@dataclass(frozen=True)
class Conversation:
    """Turns in order, at least one, and what the system said before them."""

    turns: tuple[Turn, ...]
    system: str | None = None

    @property
    def thinks(self) -> bool:
        """Whether the last answer has reasoning before it; that of earlier ones is never shown."""
        return bool(self.turns[-1].reasoning)

    def messages(self) -> list[dict[str, str]]:
        """The conversation as OpenAI-style messages."""
        found: list[dict[str, str]] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            reasoning = {"reasoning": turn.reasoning} if turn.reasoning else {}
            found += [{"role": "user", "content": turn.prompt}, {"role": "assistant", "content": turn.answer, **reasoning}]
        return found


def exchange(prompt: str, answer: str, reasoning: str | None = None, system: str | None = None) -> Conversation:
    """A conversation of one turn."""
    return Conversation((Turn(prompt, answer, reasoning),), system)


@dataclass(frozen=True)
class Piece:
    """Part of a rendered conversation: a marker, or text."""

    text: str
    part: Part
    is_marker: bool


def render(chat: ChatFormat, conversation: Conversation) -> list[Piece]:
    """A conversation piece by piece. Raises ModelError for reasoning where the family has none."""
    if conversation.thinks and chat.reasoning is None:
        raise ModelError(f"{chat.name} has no place for reasoning; set data.reasoning=drop")
    return [piece for piece in _render(chat, conversation) if piece.text]


def _render(chat: ChatFormat, conversation: Conversation) -> Iterator[Piece]:
    def frame(text: str, part: Part = "frame") -> Iterator[Piece]:
        """The format's own text, in which markers are markers."""
        for word in chat.marker_pattern.split(text):
            yield Piece(word, part, word in chat.markers)

    def said(text: str, part: Part = "frame") -> Piece:
        """Somebody's, in which nothing is."""
        return Piece(text.strip(), part, False)

    system, thinks = conversation.system, conversation.thinks
    yield from frame(chat.bos)
    if chat.system_turn and (system or (thinks and chat.think)):
        yield from frame(f"{chat.open}system\n{chat.think if thinks else ''}")
        yield said(system or "")
        yield from frame(f"{chat.close}\n")
    last = len(conversation.turns) - 1
    for i, turn in enumerate(conversation.turns):
        yield from frame(f"{chat.open}user\n")
        if system and not chat.system_turn and i == 0:
            yield Piece(f"{system}\n\n", "frame", False)
        yield said(turn.prompt)
        yield from frame(f"{chat.close}\n{chat.open}model\n")
        if i == last and turn.reasoning and chat.reasoning:
            yield from frame(chat.reasoning[0], "reasoning")
            yield said(turn.reasoning, "reasoning")
            yield from frame(chat.reasoning[1], "reasoning")
        yield said(turn.answer, "answer" if i == last else "earlier")
        yield from frame(chat.close, "answer" if i == last else "earlier")
        yield from frame("\n")


def rendered_text(pieces: Sequence[Piece]) -> str:
    """The pieces as one text."""
    return "".join(piece.text for piece in pieces)


@dataclass(frozen=True)
class Tokens:
    """One document: ids [length] int32, whether each bears loss [length] bool, each one's place in `SCOPES` [length] int8 (None: all are
    0), how many of them are the format's markers, and whether it was cut to fit."""

    ids: np.ndarray
    loss: np.ndarray
    scopes: np.ndarray | None = None
    markers: int = 0
    is_cut: bool = False


def tokenize(tokenizer: Tokenizer, rows: Sequence[Sequence[Piece]], loss: Loss = "final_answer") -> list[Tokens]:
    """Rendered conversations as tokens. A token is of a scope when it lies wholly within parts of that scope."""
    runs = [list(_runs(pieces)) for pieces in rows]
    encoded = iter(tokenizer.encode_text([(run.text, [span for span, _ in run.spans]) for row in runs for run in row if not run.is_marker]))
    return [_joined(tokenizer, row, encoded, SCOPES.index(loss)) for row in runs]


@dataclass
class _Run:
    """A marker, or text between two of them. `spans` are characters [start, end) of a scope above 0, with that scope."""

    text: str
    is_marker: bool
    spans: list[tuple[tuple[int, int], int]]


def _runs(pieces: Sequence[Piece]) -> Iterator[_Run]:
    run = _Run("", False, [])
    for piece in pieces:
        scope, start, size = PART_SCOPE[piece.part], len(run.text), len(piece.text)
        if piece.is_marker:
            if run.text:
                yield run
            yield _Run(piece.text, True, [((0, size), scope)] if scope else [])
            run = _Run("", False, [])
            continue
        run.text += piece.text
        if scope and run.spans and run.spans[-1][1] == scope and run.spans[-1][0][1] == start:
            run.spans[-1] = ((run.spans[-1][0][0], start + size), scope)
        elif scope:
            run.spans.append(((start, start + size), scope))
    if run.text:
        yield run


def _joined(tokenizer: Tokenizer, runs: list[_Run], encoded: Iterator[tuple[np.ndarray, list[tuple[int, int]]]], loss: int) -> Tokens:
    parts: list[np.ndarray] = []
    spans: list[tuple[int, int, int]] = []
    length = 0
    for run in runs:
        if run.is_marker:
            found, places = np.array([tokenizer.marker_id(run.text)], np.int32), [(0, 1)] if run.spans else []
        else:
            found, places = next(encoded)
        spans += [(length + a, length + b, scope) for (a, b), (_, scope) in zip(places, run.spans, strict=True)]
        parts.append(found)
        length += len(found)
    scopes = np.zeros(length, np.int8)
    for a, b, scope in spans:
        scopes[a:b] = scope
    return Tokens(np.concatenate(parts), scopes >= loss, scopes, sum(run.is_marker for run in runs))

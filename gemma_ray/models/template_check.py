"""Which chat format a model folder has: the one of its family that renders probe conversations as the folder's own template does.

Training on one format and serving with another goes wrong in silence, so a template that no row of `FORMATS` equals is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemma_ray.errors import ModelError, ToolError
from gemma_ray.models.gemma4 import FETCH, read_object, read_text_config
from gemma_ray.models.templates import FORMATS, ChatFormat, Conversation, Turn, exchange, render, rendered_text
from gemma_ray.models.tokenizer import Tokenizer

PROBES: tuple[Conversation, ...] = (
    exchange(" How wide is a byte? ", "8 bits\n"),
    exchange("How wide is a byte?", "```\n8 bits\n```", system="Answer briefly."),
    exchange("How wide is a byte?", "8 bits", "An octet.", "Answer briefly."),
    exchange("How wide is a byte?", "8 bits", "An octet."),
    Conversation((Turn("One?", "1"), Turn("And two?", "2")), "Count."),
)
"""What a format and a model's own template have to render alike."""


def chat_format(folder: Path, model_type: str) -> ChatFormat:
    """The chat format of a model folder: that of its family which renders `PROBES` as the folder's own template does, when it ships one.

    `model_type` is config.json's. Stock templates before Gemma 4's fifth show no reasoning in a conversation's past, so a probe's may be
    missing in theirs. Raises ModelError for a family without a row, a tokenizer that lacks a turn marker, or a template of another family.
    """
    rows = [row for row in FORMATS if model_type.startswith(row.family)]
    if not rows:
        families = ", ".join(dict.fromkeys(row.family for row in FORMATS))
        raise ModelError(f"{folder}: no chat format for model_type '{model_type}'. Known families: {families}")
    tokenizer = Tokenizer(folder)
    usable = [row for row in rows if not missing_markers(tokenizer, row)]
    if not usable:
        missing = ", ".join(min((missing_markers(tokenizer, row) for row in rows), key=len))
        raise ModelError(
            f"{tokenizer.path}: the tokenizer has no token {missing}, which {rows[0].family} marks turns with; "
            "use the tokenizer that belongs to the model"
        )
    template = own_template(folder)
    if template is None:
        return usable[0]
    differing = [(row, [probe for probe in probes_of(row) if template(probe) not in _renderings(row, probe)]) for row in usable]
    row, probes = min(differing, key=lambda found: len(found[1]))
    if probes:
        theirs, ours = template(probes[0]), rendered_text(render(row, probes[0]))
        raise ModelError(
            f"{folder}: its chat template is not {row.family}'s: it renders a probe as {theirs!r}, {row.name} as {ours!r}; "
            "training on one and serving with the other would go wrong in silence"
        )
    return row


def missing_markers(tokenizer: Tokenizer, chat: ChatFormat) -> list[str]:
    """The format's markers that are no token of their own."""
    return [marker for marker in chat.markers if tokenizer.special_id(marker) is None]


def probes_of(chat: ChatFormat) -> list[Conversation]:
    """The probes that a format can render."""
    return [probe for probe in PROBES if chat.reasoning is not None or not probe.thinks]


def probe_texts(chat: ChatFormat) -> list[str]:
    """The probes as they are rendered."""
    return [rendered_text(render(chat, probe)) for probe in probes_of(chat)]


def check_probes(folder: Path, probes: list[str]) -> None:
    """Raise ModelError unless a model folder's own template renders the probe conversations as training data had them (`probe_texts`)."""
    if not probes:
        return
    now = probe_texts(chat_format(folder, read_text_config(folder)["model_type"]))
    if now != probes:
        at = next((i for i, pair in enumerate(zip(now, probes, strict=False)) if pair[0] != pair[1]), min(len(now), len(probes)) - 1)
        raise ModelError(
            f"{folder}: its chat template renders a probe as {now[at]!r}; in training it was {probes[at]!r}. "
            "Prepare the data and train again, or put the template back"
        )


def _renderings(chat: ChatFormat, probe: Conversation) -> tuple[str, str]:
    """With the past's reasoning, and without it."""
    pieces = render(chat, probe)
    return rendered_text(pieces), rendered_text([piece for piece in pieces if piece.part != "reasoning"])


def own_template(folder: Path) -> Callable[[Conversation], str] | None:
    """A function from a conversation to its text as the folder's own chat template renders it; None when there is none.

    Raises ToolError where transformers does not work, ModelError naming the tokenizer's file that cannot be read; the function, the
    template that does not render.
    """
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        read_object(settings)
    try:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ImportError as e:
        raise ToolError(f"transformers does not work here ({_short(e)}); install the project's packages again: make setup") from e
    except Exception as e:  # as many kinds as there are files
        raise ModelError(f"{folder}: transformers cannot read its tokenizer files ({_short(e)}); {FETCH}") from e
    if not tokenizer.chat_template:
        return None

    def rendered(conversation: Conversation) -> str:
        try:
            return tokenizer.apply_chat_template(conversation.messages(), tokenize=False, enable_thinking=conversation.thinks)
        except Exception as e:  # a template is a program: it may raise anything
            own = folder / "chat_template.jinja"
            raise ModelError(f"{own if own.is_file() else settings}: the chat template does not render ({_short(e)}); {FETCH}") from e

    return rendered


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"

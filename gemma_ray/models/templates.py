"""Chat formats by model family: how a conversation becomes text, and which characters of it bear loss.

    family   opens a turn   closes it   roles                     reasoning                            loss
    gemma4   <|turn>ROLE⏎   <turn|>⏎    system, user, model       <|channel>thought⏎ … ⏎<channel|>     the model's answer and its <turn|>

Stock Gemma 4 templates carry no generation markers, so `return_assistant_tokens_mask` is all zeros for them and nothing says so
(huggingface/trl 6577). The mask is therefore made here, from characters, and the rendering is compared with the model's own template.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma_ray.errors import ModelError
from gemma_ray.models.gemma4 import FETCH, read_object
from gemma_ray.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChatFormat:
    """One family's row of the table."""

    bos: str
    open: str
    close: str
    model_role: str
    reasoning_open: str
    reasoning_close: str

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that the tokenizer must have as single pieces."""
        return (self.bos, self.open, self.close)


FORMATS: dict[str, ChatFormat] = {
    "gemma4": ChatFormat("<bos>", "<|turn>", "<turn|>", "model", "<|channel>thought\n", "\n<channel|>"),
}


@dataclass(frozen=True)
class Conversation:
    """One question and its answer. `reasoning` stands before the answer as context, None leaves it out."""

    prompt: str
    answer: str
    reasoning: str | None = None
    system: str | None = None

    def messages(self) -> list[dict[str, str]]:
        """The conversation as OpenAI-style messages."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        reasoning = {"reasoning": self.reasoning} if self.reasoning else {}
        return [*system, {"role": "user", "content": self.prompt}, {"role": "assistant", "content": self.answer, **reasoning}]


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the characters [start, end) that bear loss."""

    text: str
    loss_start: int
    loss_end: int


def render(chat: ChatFormat, conversation: Conversation) -> Rendered:
    """The text of a conversation; loss on the answer and on the marker that ends the turn."""
    turns = [("system", conversation.system)] if conversation.system else []
    turns.append(("user", conversation.prompt))
    text = chat.bos + "".join(f"{chat.open}{role}\n{content.strip()}{chat.close}\n" for role, content in turns)
    text += f"{chat.open}{chat.model_role}\n"
    if conversation.reasoning:
        text += f"{chat.reasoning_open}{conversation.reasoning.strip()}{chat.reasoning_close}"
    start = len(text)
    text += conversation.answer.strip() + chat.close
    return Rendered(text + "\n", start, len(text))


def render_prompt(chat: ChatFormat, prompt: str, system: str | None = None) -> str:
    """The text up to where the model begins to answer."""
    rendered = render(chat, Conversation(prompt, "", system=system))
    return rendered.text[: rendered.loss_start]


def tokenize(tokenizer: Tokenizer, rendered: Rendered) -> tuple[list[int], list[bool]]:
    """Ids and, for each, whether it bears loss: exactly the tokens that lie wholly within the answer."""
    encoded = tokenizer.encode(rendered.text)
    return encoded.ids, [rendered.loss_start <= a and b <= rendered.loss_end for a, b in encoded.offsets]


def chat_format(folder: Path, model_type: str) -> ChatFormat:
    """The chat format of a model folder, checked against its tokenizer and, when it ships one, its own chat template.

    `model_type` is config.json's. Raises ModelError for a family without a row, a tokenizer that lacks a turn marker, or a template that
    renders a probe conversation otherwise.
    """
    family = next((name for name in FORMATS if model_type.startswith(name)), None)
    if family is None:
        raise ModelError(f"{folder}: no chat format for model_type '{model_type}'. Known families: {', '.join(FORMATS)}")
    chat = FORMATS[family]
    tokenizer = Tokenizer(folder)
    missing = [marker for marker in chat.markers if tokenizer.special_id(marker) is None]
    if missing:
        raise ModelError(
            f"{tokenizer.path}: the tokenizer has no token {', '.join(missing)}, which {family} marks turns with; "
            "use the tokenizer that belongs to the model"
        )
    probe = Conversation(" How wide is a byte? ", "8 bits\n", system="Answer briefly.")
    theirs = own_template(folder, probe.messages())
    ours = render(chat, probe).text
    if theirs is not None and theirs != ours:
        raise ModelError(
            f"{folder}: its chat template is not {family}'s: it renders a probe as {theirs!r}, {family} as {ours!r}; "
            "training on one and serving with the other would go wrong in silence"
        )
    return chat


def own_template(folder: Path, messages: list[dict[str, str]]) -> str | None:
    """Messages as the folder's own chat template renders them; None when it has none.

    Raises ModelError naming the tokenizer's file, or the template, that cannot be read.
    """
    from transformers import AutoTokenizer

    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        read_object(settings)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as e:  # as many kinds as there are files
        raise ModelError(f"{folder}: transformers cannot read its tokenizer files ({_short(e)}); {FETCH}") from e
    if not tokenizer.chat_template:
        return None
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as e:  # a template is a program: it may raise anything
        own = folder / "chat_template.jinja"
        raise ModelError(f"{own if own.is_file() else settings}: the chat template does not render ({_short(e)}); {FETCH}") from e


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"

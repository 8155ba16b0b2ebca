"""What of a record is the question, the reasoning and the answer. The first row that fits a record reads it.

    schema              recognised by                                        answer
    messages            messages: list of role and content                   the assistant's turns
    codev-rl            prompt: list, reward_model.ground_truth              the reference module
    codev-sft           prompt and response: text                            <answer> of the response; <think> is the reasoning
    prompt-completion   prompt and completion: text, or lists of messages    the completion
    columns             data.columns of the recipe                           what it says

CodeV-R1 (https://huggingface.co/datasets/zhuyaoyu/CodeV-R1-dataset) keeps a reference as a pickled dictionary; it is read by a reader that
can build plain values only, never objects.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gemma_ray.data.config import Column
from gemma_ray.data.readers import JSON_NAMES
from gemma_ray.errors import DataError
from gemma_ray.models.templates import Turn

_THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "model": "assistant",
    "gpt": "assistant",
}
_REASONING_KEYS = ("reasoning", "reasoning_content", "thinking")


@dataclass(frozen=True)
class Example:
    """A conversation from a record."""

    turns: tuple[Turn, ...]
    system: str | None


@dataclass(frozen=True)
class Dropped:
    """Why a record is left out: a word to count by, and what there is to say about this one."""

    reason: str
    detail: str = ""


def schema_of(record: Mapping[str, Any], columns: Mapping[Column, str] | None = None) -> str:
    """The schema of a record. Raises DataError when it is of none."""
    if columns:
        return "columns"
    found = next((name for name, (fits, _) in SCHEMAS.items() if fits(record)), None)
    if found is None:
        raise DataError(f"no known columns: the record has {_some(sorted(map(str, record))) or 'none'}; {REMEDY}")
    return found


def read_example(record: Mapping[str, Any], schema: str, columns: Mapping[Column, str] | None = None) -> Example | Dropped:
    """A record of a schema as a conversation, or why it is none. Raises DataError for a value of the wrong type."""
    try:
        return _by_columns(record, columns) if columns else SCHEMAS[schema][1](record)
    except UnicodeEncodeError as e:
        return Dropped("encoding", f"half of a character, \\u{ord(e.object[e.start]):04x}")


REMEDY = "wanted are prompt and response, prompt and completion, or messages; data.columns says which column is what"


def _sft(record: Mapping[str, Any]) -> Example | Dropped:
    prompt, response = _text(record, "prompt"), _text(record, "response")
    reasoning, answers = _THINK.search(response), response.find("<answer>")
    if reasoning and reasoning.start() < answers:  # reasoning may speak of answers, too
        answers = reasoning.end()
    answer = _ANSWER.search(response, max(answers, 0))
    if answer is None:
        return Dropped("no_answer")
    return _single(prompt, answer[1], reasoning[1] if reasoning else None, None)


def _rl(record: Mapping[str, Any]) -> Example | Dropped:
    said = _conversation(record["prompt"], "prompt")
    if isinstance(said, Dropped):
        return said
    if [role for role, _, _ in said if role != "system"] != ["user"]:
        return Dropped("roles", "the prompt is more than one question")
    code = reference_code(record["reward_model"]["ground_truth"])
    if not code.strip():
        return Dropped("no_answer")
    system = next((content for role, content, _ in said if role == "system"), None)
    return _single(said[-1][1], f"```verilog\n{_valid(code).strip()}\n```", None, system)


def _completion(record: Mapping[str, Any]) -> Example | Dropped:
    if isinstance(record["prompt"], list) and isinstance(record["completion"], list):
        return _messages({"messages": [*record["prompt"], *record["completion"]]})
    return _single(_text(record, "prompt"), *_split(_text(record, "completion")), None)


def _messages(record: Mapping[str, Any], column: str = "messages") -> Example | Dropped:
    said = _conversation(record[column], column)
    if isinstance(said, Dropped):
        return said
    system = said.pop(0)[1] if said and said[0][0] == "system" else None
    roles = [role for role, _, _ in said]
    if not roles or roles != ["user", "assistant"] * (len(roles) // 2):
        return Dropped("roles", f"not user and assistant by turns: {', '.join(roles[:6]) or 'nobody'}")
    turns = [Turn(ask[1].strip(), *_split(reply[1], reply[2])) for ask, reply in zip(said[::2], said[1::2], strict=True)]
    return _checked(tuple(turns), system)


def _by_columns(record: Mapping[str, Any], columns: Mapping[Column, str]) -> Example | Dropped:
    if missing := [column for column in columns.values() if column not in record]:
        raise DataError(f"data.columns names {', '.join(missing)}; the record has {_some(sorted(map(str, record))) or 'no keys'}")
    if "messages" in columns:
        return _messages(record, columns["messages"])
    answer, reasoning = _split(_text(record, columns["answer"]))
    reasoning = (_text(record, columns["reasoning"]) or None) if "reasoning" in columns else reasoning
    system = _text(record, columns["system"]) if "system" in columns else None
    return _single(_text(record, columns["prompt"]), answer, reasoning, system)


SCHEMAS: dict[str, tuple[Callable[[Mapping[str, Any]], bool], Callable[[Mapping[str, Any]], Example | Dropped]]] = {
    "messages": (lambda r: "messages" in r, _messages),
    "codev-rl": (lambda r: isinstance(r.get("prompt"), list) and "ground_truth" in (r.get("reward_model") or {}), _rl),
    "codev-sft": (lambda r: "prompt" in r and "response" in r, _sft),
    "prompt-completion": (lambda r: "prompt" in r and "completion" in r, _completion),
}


def _single(prompt: str, answer: str, reasoning: str | None, system: str | None) -> Example | Dropped:
    return _checked((Turn(prompt.strip(), answer.strip(), (reasoning or "").strip() or None),), system)


def _checked(turns: tuple[Turn, ...], system: str | None) -> Example | Dropped:
    if not all(turn.prompt for turn in turns):
        return Dropped("no_prompt")
    if not turns[-1].answer:
        return Dropped("no_answer")
    return Example(turns, system or None)


def _split(text: str, reasoning: str | None = None) -> tuple[str, str | None]:
    """Answer and reasoning of what a model said; reasoning in it stands between <think> tags."""
    found = _THINK.match(text.lstrip())
    if reasoning is None and found:
        return text.lstrip()[found.end() :].strip(), found[1].strip() or None
    return text.strip(), (reasoning or "").strip() or None


def _conversation(messages: Any, column: str) -> list[tuple[str, str, str | None]] | Dropped:
    """Role, content and reasoning of each message."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError(f"'{column}' is {JSON_NAMES.get(type(messages), 'something')}; wanted is a list of objects with role and content")
    found = []
    for message in messages:
        role = _ROLES.get(str(message.get("role")))
        if role is None or message.get("tool_calls"):
            return Dropped("roles", f"a message of {str(message.get('role'))[:40]}")
        content = message.get("content")
        if isinstance(content, list):
            if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
                return Dropped("not_text", "a message holds more than text")
            content = "".join(str(part.get("text", "")) for part in content)
        reasoning = next((message[key] for key in _REASONING_KEYS if isinstance(message.get(key), str)), None)
        found.append((role, _text({"content": content}, "content"), None if reasoning is None else _valid(reasoning)))
    return found


def reference_code(ground_truth: Any) -> str:
    """The module of CodeV-R1's `reward_model.ground_truth`: text, JSON, or a pickled dictionary with `code` somewhere in it.

    Raises DataError when it is neither, or the pickle would build anything but plain values.
    """
    if isinstance(ground_truth, bytes):
        try:
            ground_truth = _PlainValues(io.BytesIO(ground_truth)).load()
        except Exception as e:  # a damaged pickle raises anything
            raise DataError(f"reward_model.ground_truth is no pickle of plain values ({type(e).__name__})") from e
    elif isinstance(ground_truth, str) and ground_truth.lstrip().startswith("{"):
        try:
            ground_truth = json.loads(ground_truth)
        except (ValueError, RecursionError) as e:
            raise DataError("reward_model.ground_truth begins like JSON and is none") from e
    code = ground_truth if isinstance(ground_truth, str) else _find_code(ground_truth)
    if not isinstance(code, str):
        raise DataError("reward_model.ground_truth holds no code")
    return code


class _PlainValues(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Refuse whatever is not built from literals."""
        if (module, name) in {("builtins", "set"), ("__builtin__", "set")}:
            return set
        raise pickle.UnpicklingError(f"{module}.{name}")


def _find_code(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("code"), str):
        return value["code"]
    return next((code for inner in value.values() if (code := _find_code(inner)) is not None), None)


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise DataError(f"'{key}' is {JSON_NAMES.get(type(value), 'something')}; wanted is text")
    return _valid(value)


def _valid(text: str) -> str:
    """The text, when it can be written. Raises UnicodeEncodeError for half of a character."""
    text.encode()
    return text


def _some(names: list[str], most: int = 8, width: int = 40) -> str:
    listed = ", ".join(name[:width] for name in names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
    return listed.encode(errors="backslashreplace").decode()

"""Source files to conversations: which files, which lines, and what of a record is the question, the reasoning and the answer."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma_ray.errors import DataError

_THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_FENCE = re.compile(r"```(?:system)?verilog\s*\n(.*?)```", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Parsed:
    """One source line: the conversation's parts, or why it was dropped."""

    prompt: str = ""
    reasoning: str = ""
    answer: str = ""
    dropped: str | None = None


def source_files(source: str) -> list[Path]:
    """The JSONL files that a folder, a glob or a path names, sorted. Raises DataError when there are none."""
    if "://" in source:
        raise DataError(f"data.source = '{source}': only local files are read; copy them to a disk that every host sees")
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
    elif path.is_file():
        files = [path]
    else:
        files = sorted(Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207 - an absolute pattern
    files = [file for file in files if file.is_file()]
    if not files:
        raise DataError(f"data.source = '{source}': no such file, and no *.jsonl files there")
    return files


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers from 1 and records of a JSONL file; empty lines are skipped.

    Raises DataError naming file and line for a line that is not UTF-8, not JSON or not an object.
    """
    with path.open("rb") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as e:  # also bytes that are not UTF-8, and integers of thousands of digits
                raise DataError(f"{path}:{number}: not a line of JSON ({str(e).partition(';')[0]})") from e
            if not isinstance(record, dict):
                raise DataError(f"{path}:{number}: a record is an object with 'prompt' and 'response', not {_JSON_NAMES[type(record)]}")
            yield number, record


def parse_codev(record: dict[str, Any], where: str) -> Parsed:
    """A record of CodeV-R1's SFT set: `prompt`, and `response` with `<think>…</think><answer>…```verilog…```…</answer>`.

    Raises DataError, beginning with `where`, when a key is missing or not text. A response without an answer or a module is dropped, not
    refused.
    """
    for key in ("prompt", "response"):
        if key not in record:
            raise DataError(f"{where}: needs text under '{key}'; the record has {_some(sorted(record)) or 'no keys'}")
        value = record[key]
        if not isinstance(value, str):
            raise DataError(f"{where}: needs text under '{key}', which is {_JSON_NAMES[type(value)]}")
        try:
            value.encode()
        except UnicodeEncodeError as e:
            half = f"\\u{ord(value[e.start]):04x}"
            raise DataError(f"{where}: '{key}' holds {half}, half of a character, at {e.start}; write both halves or none") from e
    answer = _ANSWER.search(record["response"])
    if answer is None:
        return Parsed(dropped="no_answer")
    if not record["prompt"].strip():
        return Parsed(dropped="no_prompt")
    fence = _FENCE.search(answer.group(1))
    if fence is None or "endmodule" not in fence.group(1):
        return Parsed(dropped="no_module")
    reasoning = _THINK.search(record["response"])
    return Parsed(record["prompt"].strip(), reasoning.group(1).strip() if reasoning else "", answer.group(1).strip())


_JSON_NAMES = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}


def _some(names: list[str], most: int = 8, width: int = 40) -> str:
    listed = ", ".join(name[:width] for name in names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
    return listed.encode(errors="backslashreplace").decode()

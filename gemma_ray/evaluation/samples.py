"""The samples file: a JSON line a sample.

    task_id         the problem's stem
    sample          its number within the problem
    prompt          what was asked (written by us; not needed to grade)
    completion      what the model answered, whole
    code            the program in it, or null
    finish_reason   stop, length, ... as the endpoint said; "refused" when it would not answer at all, with the reason in `error`

Sampling appends to it as answers come, all of a problem's lines at once, so that a killed run goes on where it stopped. Beside it lies
`samples.meta.json`, what the samples were drawn with; another model or another temperature never adds to the same file: the old one is kept
under another name and a new one begun.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma_ray.artifacts import fingerprint, read_json, write_json, write_text
from gemma_ray.errors import DataError
from gemma_ray.evaluation.extraction import extract_code

REFUSED = "refused"


@dataclass(frozen=True)
class Sample:
    """One line of the file."""

    task_id: str
    sample: int
    completion: str | None
    code: str | None
    prompt: str | None = None
    finish_reason: str | None = None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        line: dict[str, Any] = {key: getattr(self, key) for key in ("task_id", "sample", "prompt", "completion", "code", "finish_reason")}
        return {**line, "error": self.error} if self.error else line


def dump(samples: Iterable[Sample]) -> str:
    """Samples as JSON lines."""
    return "".join(json.dumps(s.to_json(), ensure_ascii=False) + "\n" for s in samples)


def read_samples(path: Path, task_ids: Collection[str]) -> list[Sample]:
    """A samples file that somebody hands in, in its own order.

    Raises DataError, naming file and line, for a missing or empty file, a line that is not a JSON object, a missing or ill-typed key, a
    task_id that the dataset does not have, and a (task_id, sample) that comes twice.
    """
    if not os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises for a name that is too long
        raise DataError(f"no samples file '{path}'")
    samples: list[Sample] = []
    seen: dict[tuple[str, int], int] = {}
    for number, text in enumerate(_lines(path), 1):
        if not text.strip():
            continue
        sample = _parse(text, f"{path}:{number}")
        if sample.task_id not in task_ids:
            raise DataError(f"{path}:{number}: the dataset has no problem '{sample.task_id}'{_example(task_ids)}")
        key = (sample.task_id, sample.sample)
        if key in seen:
            raise DataError(f"{path}:{number}: sample {sample.sample} of {sample.task_id} is already on line {seen[key]}")
        seen[key] = number
        samples.append(sample)
    if not samples:
        raise DataError(f"{path}: no samples in it. Each line needs task_id, sample, and code or completion")
    return samples


def begin(path: Path, made_from: Any) -> list[Sample]:
    """Open `path` for sampling with what `made_from` says, and return the samples already in it.

    Refused samples are dropped, so that they are asked again, and so are damaged lines, such as the last one when a kill cut it off. A
    file that was made from something else is renamed, never mixed and never lost.
    """
    meta = path.with_suffix(".meta.json")
    if path.exists() and _drawn_as(meta) != fingerprint(made_from):
        put_aside(path)
    kept = [s for s in _read_own(path) if s.finish_reason != REFUSED] if path.exists() else []
    write_json(meta, {"fingerprint": fingerprint(made_from), "made_from": made_from})
    write_text(path, dump(kept))
    return kept


def _drawn_as(meta: Path) -> str | None:
    """The fingerprint of what a samples file was drawn with; None when that is missing or damaged."""
    try:
        return str(read_json(meta)["fingerprint"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def is_text(value: str) -> bool:
    """Whether UTF-8 can write it: JSON may hold half a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def put_aside(path: Path) -> None:
    """Rename a samples file, and what says where it came from, to the first free `samples.N.jsonl`."""
    number = next(n for n in range(1, 10**6) if not path.with_name(f"{path.stem}.{n}{path.suffix}").exists())
    path.rename(path.with_name(f"{path.stem}.{number}{path.suffix}"))
    meta = path.with_suffix(".meta.json")
    if meta.exists():
        meta.rename(path.with_name(f"{path.stem}.{number}.meta.json"))


def complete_problems(samples: Iterable[Sample], n: int, prompts: dict[str, str]) -> dict[str, list[Sample]]:
    """By task_id, the samples of the problems that have all `n`, drawn from the prompt that the problem has now."""
    by_problem: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if prompts.get(sample.task_id) == sample.prompt:
            by_problem[sample.task_id].append(sample)
    return {task_id: drawn for task_id, drawn in by_problem.items() if {s.sample for s in drawn} == set(range(n)) and len(drawn) == n}


def _read_own(path: Path) -> list[Sample]:
    samples = []
    for text in _lines(path):
        with contextlib.suppress(DataError):
            samples.append(_parse(text, str(path)))
    return samples


def _lines(path: Path) -> list[str]:
    # Not splitlines(): JSON strings may hold U+2028 and the like unescaped.
    try:
        return path.read_bytes().decode("utf-8", errors="replace").removeprefix("\ufeff").split("\n")
    except OSError as e:
        raise DataError(f"{path}: cannot be read ({e.strerror})") from e


def _parse(text: str, where: str) -> Sample:
    try:
        line = json.loads(text)
    except json.JSONDecodeError as e:
        raise DataError(f"{where}: not JSON: {e.msg} at column {e.colno}") from None
    except (ValueError, RecursionError) as e:  # a number of thousands of digits, thousands of brackets
        raise DataError(f"{where}: not JSON that can be read: {e}") from None
    if not isinstance(line, dict):
        raise DataError(f"{where}: a sample is a JSON object, not a {type(line).__name__}")
    missing = [key for key in ("task_id", "sample") if key not in line]
    if "code" not in line and "completion" not in line:
        missing.append("code or completion")
    if missing:
        raise DataError(f"{where}: no {', no '.join(missing)}. A sample needs task_id, sample, and code or completion")
    number = line["sample"]
    if not isinstance(line["task_id"], str) or isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise DataError(f"{where}: task_id is a string and sample a whole number from 0, not {line['task_id']!r} and {number!r}")
    for key in ("code", "completion"):
        if not isinstance(line.get(key), str | None):
            raise DataError(f"{where}: {key} is a string or null, not a {type(line[key]).__name__}")
    code, completion = line.get("code"), line.get("completion")
    if code is None and completion is not None:
        code = extract_code(completion)
    texts = {key: value if isinstance(value := line.get(key), str) else None for key in ("prompt", "finish_reason", "error")}
    for key, value in {"code": code, "completion": completion, **texts}.items():
        if not is_text(value or ""):
            raise DataError(f"{where}: {key} holds half a surrogate pair, which is no text")
    return Sample(line["task_id"], number, completion, code, **texts)


def _example(task_ids: Collection[str]) -> str:
    return f" (its first is '{min(task_ids)}')" if task_ids else ""

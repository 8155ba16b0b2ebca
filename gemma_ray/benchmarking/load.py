"""Open-loop load: requests leave at their scheduled times, however slow the server is.

    arrival ──sent────────first chunk──chunk──chunk──last chunk
              └── TTFT ──────┘└─ITL──┘└─ITL─┘└─ITL─┘
              └────────────────── E2E ─────────────┘

A closed loop (send the next request when one returns) slows down with the server and so hides its queue. Here every request is a task of
its own on a connection of its own, and nothing it does delays the next arrival. The client can still be too slow for the rate asked:
`send_lag_s` says by how much. It is aiohttp for that reason: its parser is in C, and a streamed token costs a third of httpx's time.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np


@dataclass(frozen=True)
class RequestRecord:
    """One request. Times are seconds since the cell began; `error` is None when the whole answer came."""

    arrival_s: float
    sent_s: float
    chunk_s: tuple[float, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    status: int | None = None
    """HTTP status, or the code of an error in the stream; None when no answer came."""

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def send_lag_s(self) -> float:
        """How late the client itself was."""
        return self.sent_s - self.arrival_s

    @property
    def ttft_s(self) -> float:
        """Sent to first chunk."""
        return self.chunk_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Sent to last chunk."""
        return self.chunk_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of the output tokens after the first; None when there are none."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl_s(self) -> list[float]:
        """Gaps between chunks; a server that puts several tokens in a chunk has fewer and longer ones."""
        return [b - a for a, b in zip(self.chunk_s, self.chunk_s[1:], strict=False)]


def poisson_arrivals(requests: int, qps: float, rng: np.random.Generator) -> list[float]:
    """Arrival times [requests] in seconds, the first at 0; all 0 when `qps` is inf.

    Exponential gaps, scaled so that their mean is exactly 1 / qps: two cells of one rate then offer the same load, however few their
    requests. `vllm bench serve` scales likewise (vllm/benchmarks/serve.py, `get_request`).
    """
    if np.isinf(qps) or requests == 1:
        return [0.0] * requests
    times = np.cumsum(rng.exponential(size=requests - 1))
    return [0.0, *(times * ((requests - 1) / qps / times[-1])).tolist()]


def completion_body(model: str, prompt: Sequence[int], output_tokens: int) -> bytes:
    """The JSON of a streaming /v1/completions request that generates exactly `output_tokens` greedy tokens from token ids.

    `ignore_eos` is vLLM's; a server that does not know it may stop early, which the cell's `short_outputs` counts.
    """
    return json.dumps(
        {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


async def run_load(
    client: aiohttp.ClientSession,
    url: str,
    bodies: Sequence[bytes],
    arrivals_s: Sequence[float],
    timeout_s: float,
    answered: Callable[[], None] = lambda: None,
) -> list[RequestRecord]:
    """POST every body to `url` at its arrival time and wait for all the answers; failures are in the records, never raised.

    `answered` is called after each answer.
    """
    began = time.perf_counter()
    tasks = []
    for body, arrival in zip(bodies, arrivals_s, strict=True):
        wait = arrival - (time.perf_counter() - began)
        if wait > 0:
            await asyncio.sleep(wait)
        task = asyncio.create_task(stream_completion(client, url, body, timeout_s, began, arrival))
        task.add_done_callback(lambda _: answered())
        tasks.append(task)
    return list(await asyncio.gather(*tasks))


async def stream_completion(
    client: aiohttp.ClientSession, url: str, body: bytes, timeout_s: float, began: float, arrival_s: float = 0.0
) -> RequestRecord:
    """One streaming request. `began` is the `time.perf_counter()` that the record's times count from."""
    sent = time.perf_counter() - began
    chunks: list[float] = []
    usage: tuple[int, int] | None = None
    finished = False
    status = None

    def record(error: str | None = None) -> RequestRecord:
        return RequestRecord(
            arrival_s=arrival_s,
            sent_s=sent,
            chunk_s=tuple(chunks),
            input_tokens=usage[0] if usage else 0,
            # A server without usage in its stream: vLLM sends one chunk a token.
            output_tokens=(usage[1] if usage else 0) or len(chunks),
            error=error,
            status=status,
        )

    try:
        async with asyncio.timeout(timeout_s), client.post(url, data=body) as response:
            status = response.status
            if status != 200:
                return record(f"HTTP {status}: {_error_message(await response.read())}")
            async for event, received in _events(response, began):
                if event == "[DONE]":
                    finished = True
                    continue
                message = json.loads(event)
                if error := message.get("error"):
                    # vLLM refuses some prompts only in the stream, after a 200; the refusal's own code says what it is.
                    status = error.get("code", status) if isinstance(error, dict) else status
                    return record(f"error in the stream: {_first_line(error)}")
                if choices := message.get("choices"):
                    chunks.append(received)
                    finished = finished or choices[0].get("finish_reason") is not None
                if counts := message.get("usage"):
                    usage = _token_counts(counts)
    except TimeoutError:
        return record(f"no whole answer in {timeout_s:g} s (bench.timeout_s)")
    except aiohttp.ClientError as e:
        return record(f"{type(e).__name__}: {_first_line(str(e)) or 'no reason given'}")
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError) as e:
        return record(f"not an OpenAI stream: {_first_line(str(e))}")
    if not chunks:
        return record("an answer without a single token")
    return record(None if finished or usage else "the stream ended before the answer did")


async def _events(response: aiohttp.ClientResponse, began: float) -> AsyncIterator[tuple[str, float]]:
    """The data of each server-sent event, and when its bytes came, in seconds since `began`."""
    buffer = b""
    async for block in response.content.iter_any():
        received = time.perf_counter() - began
        *lines, buffer = (buffer + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):  # other lines are blank, or comments that keep the connection alive
                yield line[5:].strip().decode(), received


def _token_counts(usage: Any) -> tuple[int, int]:
    """Tokens read and generated. Raises ValueError and the like for what is no such report."""
    read, generated = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    if not all(isinstance(count, int) and 0 <= count < 1 << 53 for count in (read, generated)):
        raise ValueError(f"usage of {read!r} and {generated!r} tokens")
    return read, generated


def _error_message(body: bytes) -> str:
    """The message in an error's body, in one line: OpenAI's form, FastAPI's, or the body itself."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return _first_line(body.decode(errors="replace"))
    return _first_line(parsed)


def _first_line(error: Any) -> str:
    while isinstance(error, dict) and (inner := error.get("error") or error.get("message") or error.get("detail")):
        error = inner
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""

"""A server with vLLM's streaming protocol and delays that a test chooses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class StreamServer:
    """Answers /v1/models and /v1/completions. Change its fields before the requests come."""

    first_s: float = 0.0
    gap_s: float = 0.0
    models: tuple[str, ...] = ("tiny",)
    max_model_len: int | None = 4096
    ray_card: bool = False
    refuse_over: int | None = None
    refuse_in_stream: bool = False
    fail: str | None = None
    """http500 | cut | error_event | silent"""
    fail_every: int = 1
    send_usage: bool = True
    usage: Any = None
    """Stands in the place of the tokens counted."""
    event: bytes | None = None
    """Stands in the place of the whole stream."""
    cards: bytes | None = None
    """The whole answer of /v1/models."""
    stop_at: int | None = None
    prompts: list[list[int]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: StreamServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self, status: int, value: Any) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        limit = self.state.max_model_len
        card = {"metadata": {"max_request_context_length": limit}} if self.state.ray_card else {"max_model_len": limit}
        cards = {"object": "list", "data": [{"id": name, "object": "model", **card} for name in self.state.models]}
        self.reply(200, cards if self.state.cards is None else self.state.cards)

    def do_POST(self) -> None:
        state = self.state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with state.lock:
            state.bodies.append(body)
            number = len(state.bodies)
            state.in_flight += 1
            state.most_in_flight = max(state.most_in_flight, state.in_flight)
        try:
            self.complete(body, fails=state.fail is not None and number % state.fail_every == 0)
        finally:
            with state.lock:
                state.in_flight -= 1

    def complete(self, body: dict[str, Any], fails: bool) -> None:
        state, prompt, tokens = self.state, body["prompt"], body["max_tokens"]
        if state.refuse_over is not None and len(prompt) + tokens > state.refuse_over:
            refusal = {"error": {"message": f"maximum context length is {state.refuse_over} tokens", "code": 400}}
            if not state.refuse_in_stream:
                return self.reply(400, refusal)
            self.start_stream()
            self.event(refusal)
            return self.chunk(b"")
        if fails and state.fail == "http500":
            return self.reply(500, {"detail": "engine is dead"})
        self.start_stream()
        if fails and state.fail == "silent":
            return self.chunk(b"")
        if state.event is not None:
            self.chunk(b"data: " + state.event + b"\n\n")
            return self.chunk(b"")
        tokens = min(tokens, state.stop_at or tokens)
        for i in range(tokens):
            time.sleep(state.gap_s if i else state.first_s)
            last = i == tokens - 1
            self.event({"choices": [{"index": 0, "text": "x", "finish_reason": "length" if last else None}]})
            if fails and i == 1 and state.fail == "cut":
                self.close_connection = True
                return None
            if fails and i == 1 and state.fail == "error_event":
                self.event({"error": {"message": "out of memory", "type": "InternalServerError"}})
                return self.chunk(b"")
        if state.send_usage:
            self.event({"choices": [], "usage": state.usage or {"prompt_tokens": len(prompt), "completion_tokens": tokens}})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")
        with state.lock:
            state.prompts.append(prompt)
        return None

    def start_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.chunk(b": keep-alive\n\n")

    def event(self, value: Any) -> None:
        self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


@pytest.fixture
def server() -> Iterator[StreamServer]:
    state = StreamServer()
    httpd = Server(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"state": state}))
    state.url = f"http://127.0.0.1:{httpd.server_address[1]}"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield state
    httpd.shutdown()
    httpd.server_close()
    thread.join()

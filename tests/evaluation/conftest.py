"""VerilogEval's problems, and a small OpenAI-compatible endpoint on a real socket."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gemma_ray.evaluation.benchmarks import Problem, load_problems

VERILOG_EVAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "verilog-eval"


@pytest.fixture(scope="session")
def verilog_eval() -> Path:
    if not VERILOG_EVAL.is_dir():
        pytest.skip("no VerilogEval at ../shared/data/verilog-eval")
    return VERILOG_EVAL


@pytest.fixture(scope="session")
def problems(verilog_eval: Path) -> dict[str, Problem]:
    return {p.task_id: p for p in load_problems(verilog_eval)}


@pytest.fixture
def icarus() -> None:
    if shutil.which("iverilog") is None:
        pytest.skip("no Icarus Verilog")


@pytest.fixture
def tiny_dataset(tmp_path: Path) -> Path:
    """Three problems in VerilogEval's layout: a one, an inverter, an and gate; each bench takes 20 samples."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    for number, (name, ports, formula) in enumerate(
        [("one", "", "1'b1"), ("not", "input a, ", "~a"), ("and", "input a, input b, ", "a & b")], 1
    ):
        stem = f"Prob{number:03}_{name}"
        names = [p for p in ("a", "b") if f"input {p}" in ports]
        wires = "".join(f".{p}({p}), " for p in names)
        (folder / f"{stem}_prompt.txt").write_text(f"Write TopModule: q is {formula}.\n")
        (folder / f"{stem}_ref.sv").write_text(f"module RefModule({ports}output q);\n  assign q = {formula};\nendmodule\n")
        (folder / f"{stem}_test.sv").write_text(f"""`timescale 1 ps/1 ps
module tb();
  reg a = 0, b = 0;
  wire q_ref, q_dut;
  int errors, clocks;
  RefModule good1({wires}.q(q_ref));
  TopModule top_module1({wires}.q(q_dut));
  initial begin
    repeat (20) begin
      #5 {{a, b}} = $random;
      #5 clocks++;
      if (q_ref !== q_dut) errors++;
    end
    $finish;
  end
  final $display("Mismatches: %1d in %1d samples", errors, clocks);
endmodule
""")
    return folder


SOLUTIONS = {
    "Prob001_one": "module TopModule(output q);\n  assign q = 1'b1;\nendmodule\n",
    "Prob002_not": "module TopModule(input a, output q);\n  assign q = ~a;\nendmodule\n",
    "Prob003_and": "module TopModule(input a, input b, output q);\n  assign q = a & b;\nendmodule\n",
}


class StandIn:
    """An endpoint whose answers a test scripts: `reply(body, number)` gives (status, JSON or bytes) for the number-th chat request."""

    def __init__(self, reply: Callable[[dict[str, Any], int], tuple[int, Any]], models: tuple[str, ...] = ("tiny",)):
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        lock = threading.Lock()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.answer(200, {"data": [{"id": m} for m in models]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    stand_in.requests.append(body)
                    stand_in.headers.append(dict(self.headers))
                    number = len(stand_in.requests)
                self.answer(*reply(body, number))

            def answer(self, status: int, document: Any) -> None:
                if status == 0:  # drop the connection without an answer
                    self.close_connection = True
                    self.connection.close()
                    return
                payload = document if isinstance(document, bytes) else json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                if not isinstance(sys.exception(), OSError):  # a connection that either side dropped
                    super().handle_error(request, client_address)

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def stand_in() -> Iterator[Callable[..., StandIn]]:
    started: list[StandIn] = []

    def start(reply: Callable[[dict[str, Any], int], tuple[int, Any]], models: tuple[str, ...] = ("tiny",)) -> StandIn:
        started.append(StandIn(reply, models))
        return started[-1]

    yield start
    for one in started:
        one.close()


def choices(*texts: str, reason: str = "stop") -> dict[str, Any]:
    """A chat completion with these answers."""
    return {"choices": [{"index": i, "message": {"role": "assistant", "content": t}, "finish_reason": reason} for i, t in enumerate(texts)]}


@pytest.fixture
def completion() -> Callable[..., dict[str, Any]]:
    return choices


@pytest.fixture
def solutions() -> dict[str, str]:
    return SOLUTIONS

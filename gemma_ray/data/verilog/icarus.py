"""Icarus Verilog: finding it, and checking many modules against their golden models in one simulation.

Each module of a batch gets a name and a driver of its own; all drivers run side by side. Vectors and expected values are read from files,
since compiling them would cost more than simulating them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import Template

from gemma_ray.data.verilog.family import Family, Port, vector
from gemma_ray.data.verilog.golden import CLOCK, Expected, Params
from gemma_ray.data.verilog.split import point_key
from gemma_ray.data.verilog.stimulus import stimulus
from gemma_ray.errors import StageError, ToolError
from gemma_ray.icarus import COMPILE, INSTALL

_BATCH = 100
_LIMIT_S = 120

_DRIVER = Template("""\
module t$id;
$declarations
  M$id dut ($connections);
  reg [$in_top:0] vectors [0:$last_vector];
  reg [$out_top:0] expected [0:$last_sample];
  integer k;
  task check(input integer sample);
    if (expected[sample] !== (expected[sample] ^ {$outputs} ^ expected[sample]) || !($widths)) $$display("FAIL $id %0d", sample);
  endtask
  initial begin
    $$readmemb("$id.vectors", vectors);
    $$readmemb("$id.expected", expected);
    for (k = 0; k <= $last_vector; k = k + 1) begin
      {$inputs} = vectors[k];
$samples
    end
    $$display("DONE $id");
  end
endmodule
""")
_CLOCKED_SAMPLES = "      #4 check(2 * k);\n      #1 clk = ~clk;\n      #4 check(2 * k + 1);\n      #1;"
_PLAIN_SAMPLES = "      #4 check(k);\n      #1;"


def icarus_version() -> str:
    """The simulator's version, such as `11.0`. Raises ToolError when it is not installed."""
    if shutil.which("iverilog") is None or shutil.which("vvp") is None:
        raise ToolError(f"iverilog and vvp are not on PATH: {INSTALL}")
    told = subprocess.run(["iverilog", "-V"], capture_output=True, text=True, timeout=_LIMIT_S, check=False).stdout
    found = re.search(r"version (\S+)", told)
    return found.group(1) if found else "unknown"


def check_modules(points: Sequence[tuple[Family, Params]]) -> int:
    """Simulate the module of every point against its golden model; returns how many samples were compared.

    Raises ToolError without a simulator, StageError naming family and parameters of the first module that does not compile without a
    warning, or whose outputs differ.
    """
    icarus_version()
    batches = [points[start : start + _BATCH] for start in range(0, len(points), _BATCH)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return sum(pool.map(_check_batch, batches))


def _check_batch(batch: Sequence[tuple[Family, Params]]) -> int:
    with tempfile.TemporaryDirectory(prefix="gemma-ray-verilog-") as folder:
        samples = [_write_module(Path(folder), number, family, p) for number, (family, p) in enumerate(batch)]
        tops = [word for number in range(len(batch)) for word in ("-s", f"t{number}")]
        files = [f"{kind}{number}.sv" for number in range(len(batch)) for kind in ("M", "t")]
        compiled = _run([*COMPILE, *tops, "-o", "batch", *files], folder)
        if compiled.returncode or compiled.stderr.strip():
            named = re.search(r"[Mt](\d+)\.sv:.*", compiled.stderr)
            where = point_key(*batch[int(named.group(1))]) if named else f"one of {len(batch)} modules"
            raise StageError(f"{where}: its Verilog does not compile cleanly: {named.group(0) if named else compiled.stderr[:500]}")
        log = _run(["vvp", "-n", "batch"], folder).stdout
    failed = re.search(r"^FAIL (\d+) (\d+)$", log, re.MULTILINE)
    if failed:
        raise StageError(
            f"{point_key(*batch[int(failed.group(1))])}: its Verilog differs from its golden model at sample {failed.group(2)}"
        )
    if missing := set(range(len(batch))) - {int(number) for number in re.findall(r"^DONE (\d+)$", log, re.MULTILINE)}:
        raise StageError(f"{point_key(*batch[min(missing)])}: its simulation did not end: {log[-300:]}")
    return sum(samples)


def _write_module(folder: Path, number: int, family: Family, p: Params) -> int:
    """Write a point's module, driver, vectors and expected values; returns the number of samples."""
    ports = family.ports(p)
    inputs = [port for port in ports if port.direction == "input" and port.name != CLOCK]
    outputs = [port for port in ports if port.direction == "output"]
    vectors = stimulus(family, p)
    expected = family.model(p, vectors)
    driver = _DRIVER.substitute(
        id=number,
        declarations=declarations(ports),
        connections=", ".join(f".{port.name}({port.name})" for port in ports),
        inputs=", ".join(port.name for port in inputs),
        outputs=", ".join(port.name for port in outputs),
        widths=" && ".join(f"$bits(dut.{port.name}) == {port.width}" for port in ports),
        in_top=sum(port.width for port in inputs) - 1,
        out_top=sum(port.width for port in outputs) - 1,
        last_vector=len(vectors) - 1,
        last_sample=len(expected) - 1,
        samples=_CLOCKED_SAMPLES if family.clocked else _PLAIN_SAMPLES,
    )
    (folder / f"M{number}.sv").write_text(family.module(p, f"M{number}") + "\n")
    (folder / f"t{number}.sv").write_text(driver)
    (folder / f"{number}.vectors").write_text("\n".join(binary(inputs, vector) for vector in vectors) + "\n")
    (folder / f"{number}.expected").write_text("\n".join(binary(outputs, values) for values in expected) + "\n")
    return len(expected)


def declarations(ports: Sequence[Port], suffix: str = "") -> str:
    """Declarations of a bench's own signals for `ports`: the clock starts low; outputs are wires named with `suffix`."""
    lines = []
    for port in ports:
        if port.direction == "output":
            lines.append(f"  wire {vector(port.width)}{port.name}{suffix};")
        else:
            lines.append(f"  reg {vector(port.width)}{port.name}{' = 0' if port.name == CLOCK else ''};")
    return "\n".join(lines)


def binary(ports: Sequence[Port], values: Expected) -> str:
    """The values of ports as one binary word, first port first; unknown values are x."""
    return "".join("x" * port.width if values is None else f"{values[port.name]:0{port.width}b}" for port in ports)


def run_bench(answer: str, reference: str, bench: str) -> tuple[str, str]:
    """Compile and run a held-out bench as VerilogEval does; returns the compiler's messages and the simulation's log.

    For modules of this package only: nothing confines what is run.
    """
    with tempfile.TemporaryDirectory(prefix="gemma-ray-verilog-") as folder:
        for name, text in (("dut.sv", answer), ("test.sv", bench), ("ref.sv", reference)):
            (Path(folder) / name).write_text(text + "\n")
        told = _run([*COMPILE, "-s", "tb", "-o", "bench", "dut.sv", "test.sv", "ref.sv"], folder)
        if told.returncode:
            return told.stdout + told.stderr, ""
        return told.stdout + told.stderr, _run(["vvp", "-n", "bench"], folder).stdout


def _run(command: Sequence[str], folder: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_LIMIT_S, check=False)

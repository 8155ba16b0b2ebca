"""Held-out problems in the layout of VerilogEval's spec-to-rtl set: a prompt, a reference and a bench.

    Prob007_gate_xor_8_prompt.txt   the request
    Prob007_gate_xor_8_ref.sv       module RefModule
    Prob007_gate_xor_8_test.sv      module tb: drives RefModule and TopModule alike and counts the samples where they differ

A bench prints what VerilogEval's do, so its analysis reads it: hints, then `Mismatches: X in Y samples`, or TIMEOUT. Where the reference is
unknown (x) anything goes. Unlike VerilogEval's it also compares the widths of ports, which Verilog itself would adapt in silence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from string import Template

from gemma_ray.data.verilog.family import Family
from gemma_ray.data.verilog.golden import CLOCK, Params
from gemma_ray.data.verilog.icarus import binary, declarations
from gemma_ray.data.verilog.stimulus import stimulus

_BENCH = Template("""\
`timescale 1 ps/1 ps

module tb;

$signals
  reg [$in_top:0] vectors [0:$last_vector];
  integer vector;
  integer samples = 0;
  integer errors = 0;
$counters

  RefModule good1 ($ref_connections);
  TopModule top_module1 ($dut_connections);

  wire widths_match = $widths;

  task sample;
    samples = samples + 1;
    if (!widths_match || $differs) errors = errors + 1;
$count
  endtask

  initial begin
$vectors
    for (vector = 0; vector <= $last_vector; vector = vector + 1) begin
      {$inputs} = vectors[vector];
$samples
    end
    $$finish;
  end

  initial begin
    #1000000
    $$display("TIMEOUT");
    $$finish;
  end

  final begin
$hints
    if (!widths_match) $$display("Hint: A port of TopModule has the wrong width.");
    $$display("Hint: Total mismatched samples is %1d out of %1d samples\\n", errors, samples);
    $$display("Simulation finished at %0d ps", $$time);
    $$display("Mismatches: %1d in %1d samples", errors, samples);
  end

endmodule
""")
_CLOCKED_SAMPLES = "      #4 sample;\n      #1 clk = ~clk;\n      #4 sample;\n      #1;"
_PLAIN_SAMPLES = "      #4 sample;\n      #1;"


@dataclass(frozen=True)
class Problem:
    """One held-out problem and the texts of its three files."""

    name: str
    family: str
    parameters: Params
    prompt: str
    reference: str
    bench: str
    answer: str

    @property
    def files(self) -> dict[str, str]:
        """File name → text."""
        return {f"{self.name}_prompt.txt": self.prompt, f"{self.name}_ref.sv": self.reference, f"{self.name}_test.sv": self.bench}


def problem(number: int, family: Family, p: Params, phrasing: int) -> Problem:
    """The problem of a point, numbered from 1."""
    words = re.sub(r"[^a-z0-9]+", "_", "_".join([family.name, *map(str, p.values())]).lower()).strip("_")
    return Problem(
        name=f"Prob{number:03d}_{words}",
        family=family.name,
        parameters=p,
        prompt=f"{family.prompt(p, phrasing)}\n",
        reference=f"{family.module(p, 'RefModule')}\n",
        bench=bench(family, p),
        answer=family.module(p),
    )


def bench(family: Family, p: Params) -> str:
    """The bench of a point: module tb."""
    ports = family.ports(p)
    inputs = [port for port in ports if port.direction == "input" and port.name != CLOCK]
    outputs = [port for port in ports if port.direction == "output"]
    vectors = stimulus(family, p)
    in_width = sum(port.width for port in inputs)
    differs = {port.name: f"{port.name}_ref !== ({port.name}_ref ^ {port.name}_dut ^ {port.name}_ref)" for port in outputs}

    def connections(suffix: str) -> str:
        return ", ".join(f".{port.name}({port.name}{suffix if port.direction == 'output' else ''})" for port in ports)

    return _BENCH.substitute(
        signals="\n".join(
            [
                declarations([port for port in ports if port.direction == "input"]),
                declarations(outputs, "_ref"),
                declarations(outputs, "_dut"),
            ]
        ),
        in_top=in_width - 1,
        last_vector=len(vectors) - 1,
        counters="\n".join(f"  integer errors_{port.name} = 0;\n  integer errortime_{port.name} = 0;" for port in outputs),
        ref_connections=connections("_ref"),
        dut_connections=connections("_dut"),
        widths=" && ".join(f"$bits(top_module1.{port.name}) == {port.width}" for port in ports),
        differs=" || ".join(differs.values()),
        count="\n".join(
            f"    if ({differs[port.name]}) begin\n"
            f"      if (errors_{port.name} == 0) errortime_{port.name} = $time;\n"
            f"      errors_{port.name} = errors_{port.name} + 1;\n"
            "    end"
            for port in outputs
        ),
        vectors="\n".join(
            f"    vectors[{number}] = {in_width}'h{int(binary(inputs, values), 2):x};" for number, values in enumerate(vectors)
        ),
        inputs=", ".join(port.name for port in inputs),
        samples=_CLOCKED_SAMPLES if family.clocked else _PLAIN_SAMPLES,
        hints="\n".join(
            f"    if (errors_{port.name})\n"
            f"      $display(\"Hint: Output '{port.name}' has %0d mismatches. First mismatch occurred at time %0d.\","
            f" errors_{port.name}, errortime_{port.name});\n"
            f"    else $display(\"Hint: Output '{port.name}' has no mismatches.\");"
            for port in outputs
        ),
    )

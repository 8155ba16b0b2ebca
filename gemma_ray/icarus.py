"""What every use of Icarus Verilog shares: VerilogEval's compile command, and how to get the simulator."""

from __future__ import annotations

COMPILE = ("iverilog", "-Wall", "-Winfloop", "-Wno-timescale", "-g2012")
"""VerilogEval's compile command, up to the top module and the files (https://github.com/NVlabs/verilog-eval, v2)."""

INSTALL = "install Icarus Verilog (Debian, Ubuntu: apt-get install iverilog; macOS: brew install icarus-verilog)"
"""What to do when `iverilog` or `vvp` is missing."""

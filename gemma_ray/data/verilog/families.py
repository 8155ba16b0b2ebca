"""All families by name."""

from __future__ import annotations

from gemma_ray.data.verilog.families_arithmetic import ARITHMETIC
from gemma_ray.data.verilog.families_clocked import CLOCKED
from gemma_ray.data.verilog.families_logic import LOGIC
from gemma_ray.data.verilog.family import Family, check_family


def _by_name(*tables: tuple[Family, ...]) -> dict[str, Family]:
    families: dict[str, Family] = {}
    for family in (family for table in tables for family in table):
        if family.name in families:
            raise ValueError(f"two families are named {family.name}")
        check_family(family)
        families[family.name] = family
    return families


FAMILIES = _by_name(LOGIC, ARITHMETIC, CLOCKED)
"""Name → family."""

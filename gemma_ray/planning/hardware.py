"""What a chip can do, and what an hour of it costs. A new accelerator is a row here, and one in `raycluster.slices` to run on it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from gemma_ray.errors import RecipeError

GIB = 2**30
_PAPER = "arXiv 2605.25645"


@dataclass(frozen=True)
class Chip:
    """One accelerator chip. Rates are peaks of dense arithmetic, a second; bandwidths are bytes a second."""

    name: str
    bf16_flops: float
    int8_ops: float
    """int8 on TPU, fp8 on H100 and H200."""
    hbm_bytes: int
    hbm_bandwidth: float
    interconnect_bandwidth: float
    """All ICI links of a TPU, one direction (half of what Google gives as bidirectional); NVLink of a GPU, both directions together."""
    clock_hz: float | None
    """Of the matrix units; None off TPU, where XLA's cycles mean nothing."""
    usd_per_hour: float | None
    """On demand, a chip; None where no public price was found."""
    price_source: str | None
    source: str
    as_of: str


# TPU clocks follow from peak = 2 · matrix units · side² · clock: v5p and v4 8 units of 128², v5e 4 of 128², v6e 4 of 256². (Google's page
# on v6e has two units; XLA's cycles for a large product are fewer than two could do it in.)
_TPU = "https://cloud.google.com/tpu/docs/{}"
# fmt: off
CHIPS: dict[str, Chip] = {
    row.name: row
    for row in (
        #     name    bf16      int8/fp8  HBM                 B/s       links     clock   USD/h
        Chip("v4",    275e12,   275e12,   32 * GIB,           1228e9,   300e9,    1.05e9, None,  None,
             _TPU.format("v4"), "2026"),
        Chip("v5e",   197e12,   394e12,   16 * GIB,           819e9,    200e9,    1.50e9, None,  None,
             _TPU.format("v5e"), "2026"),
        Chip("v5p",   459e12,   918e12,   95 * GIB,           2765e9,   600e9,    1.75e9, 4.20,  f"v5p-8 at 16.80, {_PAPER}, May 2026",
             _TPU.format("v5p"), "2026"),
        Chip("v6e",   918e12,   1836e12,  32 * GIB,           1640e9,   400e9,    1.75e9, 2.69,  f"v6e-8 at 21.52, {_PAPER}, May 2026",
             _TPU.format("v6e"), "2026"),
        Chip("a100",  312e12,   624e12,   80 * 10**9,         2039e9,   600e9,    None,   None,  None,
             "NVIDIA A100 80GB SXM data sheet", "2021"),
        Chip("h100",  989.4e12, 1978.9e12, 80 * 10**9,        3350e9,   900e9,    None,   11.06, f"2 GPUs at 22.12, {_PAPER}, May 2026",
             "NVIDIA H100 SXM data sheet", "2023"),
        Chip("h200",  989.4e12, 1978.9e12, 141 * 10**9,       4800e9,   900e9,    None,   None,  None,
             "NVIDIA H200 SXM data sheet", "2024"),
    )
}
# fmt: on


LEAST, MOST = 1e-6, 1e18
"""Of a figure that a recipe may give."""


def chip(name: str, overrides: Mapping[str, float] | None = None) -> Chip:
    """A row of the table, with figures of the recipe's own in place of some.

    Raises RecipeError for a name or a figure that does not exist, naming the nearest.
    """
    if name not in CHIPS:
        near = difflib.get_close_matches(name, CHIPS, n=1)
        raise RecipeError(f"no figures for accelerator '{name}'.{_did_you_mean(near)} Known: {', '.join(CHIPS)}")
    figures = [field.name for field in dataclasses.fields(Chip) if field.name not in ("name", "source", "as_of", "price_source")]
    for key, value in (overrides or {}).items():
        if key not in figures:
            near = difflib.get_close_matches(key, figures, n=1)
            raise RecipeError(f"plan.hardware.{key}: a chip has no such figure.{_did_you_mean(near)} Known: {', '.join(figures)}")
        if not LEAST <= value <= MOST:
            raise RecipeError(f"plan.hardware.{key} = {value}: must be above 0, from {LEAST:g} to {MOST:g}")
    found = CHIPS[name]
    if not overrides:
        return found
    price_source = "plan.hardware.usd_per_hour" if "usd_per_hour" in overrides else found.price_source
    source = f"{found.source}; {', '.join(overrides)} by the recipe"
    return dataclasses.replace(found, **dict(overrides), source=source, price_source=price_source)


def why_not_described(accelerator: str, topology: str | None) -> str | None:
    """Why XLA's compiler has no such devices to compile for; None when it has."""
    if topology is None:
        return f"nothing was compiled: {accelerator} is no TPU, and only TPUs can be compiled for without one"
    if accelerator == "v4":
        return "nothing was compiled: the compiler describes v4's two cores a chip as devices of their own, which JAX joins on the chip"
    return None


def _did_you_mean(near: list[str]) -> str:
    return f" Did you mean '{near[0]}'?" if near else ""

"""The figures of a chip against one another and against what they were worked out from; `test_plan.py` has names and overrides."""

from __future__ import annotations

import pytest

from gemma_ray.errors import RecipeError
from gemma_ray.planning.hardware import CHIPS, GIB, chip

TPUS = ("v4", "v5e", "v5p", "v6e")
GPUS = ("a100", "h100", "h200")


@pytest.mark.parametrize(("name", "units", "side"), [("v4", 8, 128), ("v5e", 4, 128), ("v5p", 8, 128), ("v6e", 4, 256)])
def test_the_peak_of_a_tpu_is_its_matrix_units_times_its_clock(name: str, units: int, side: int) -> None:
    row = chip(name)
    assert row.clock_hz is not None
    assert row.bf16_flops == pytest.approx(2 * units * side**2 * row.clock_hz, rel=0.002)


def test_tpus_have_a_clock_and_gpus_none() -> None:
    assert {name: row.clock_hz is not None for name, row in CHIPS.items()} == {**dict.fromkeys(TPUS, True), **dict.fromkeys(GPUS, False)}


def test_eight_bits_are_twice_as_fast_but_on_v4() -> None:
    assert {name: round(row.int8_ops / row.bf16_flops, 2) for name, row in CHIPS.items()} == {**dict.fromkeys(TPUS + GPUS, 2), "v4": 1}


def test_links_are_the_published_gigabits() -> None:
    gigabits = {"v4": 2400, "v5e": 1600, "v5p": 4800, "v6e": 3200}  # one way; 800 GB/s both ways for v6e
    assert {name: CHIPS[name].interconnect_bandwidth for name in TPUS} == {name: g * 1e9 / 8 for name, g in gigabits.items()}


def test_memory_is_what_the_vendors_say() -> None:
    assert {name: CHIPS[name].hbm_bytes for name in TPUS} == {"v4": 32 * GIB, "v5e": 16 * GIB, "v5p": 95 * GIB, "v6e": 32 * GIB}
    assert {name: CHIPS[name].hbm_bytes for name in GPUS} == {"a100": 80 * 10**9, "h100": 80 * 10**9, "h200": 141 * 10**9}


def test_prices_are_the_papers_divided_by_its_chips() -> None:
    """arXiv 2605.25645: v5p-8 is 4 chips, v6e-8 is 8, and two H100."""
    priced = {name: row.usd_per_hour for name, row in CHIPS.items() if row.usd_per_hour is not None}
    assert priced == {"v5p": 16.80 / 4, "v6e": pytest.approx(21.52 / 8), "h100": 22.12 / 2}
    assert all("2605.25645" in str(CHIPS[name].price_source) for name in priced)


@pytest.mark.parametrize("name", CHIPS)
def test_every_row_says_where_its_figures_are_from_and_when(name: str) -> None:
    row = CHIPS[name]
    assert row.name == name
    assert row.source
    assert row.as_of.isdigit()
    assert (row.price_source is None) == (row.usd_per_hour is None)


def test_an_override_leaves_the_table_alone() -> None:
    assert chip("v6e", {"usd_per_hour": 1.0}).usd_per_hour == 1.0
    assert chip("v6e").usd_per_hour == CHIPS["v6e"].usd_per_hour != 1.0
    assert chip("v6e", {}) is CHIPS["v6e"]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_figure_that_is_no_amount_is_refused(value: float) -> None:
    with pytest.raises(RecipeError, match=r"plan\.hardware\.hbm_bytes"):
        chip("v6e", {"hbm_bytes": value})

"""The recipe's page lists every key, and is what the models say now."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from gemma_ray.recipe import Recipe

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def rendered() -> str:
    return runpy.run_path(str(ROOT / "scripts" / "recipe_docs.py"))["render"]()


def test_the_committed_page_is_up_to_date(rendered: str):
    assert (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8") == rendered, "run `make docs`"


def test_every_section_and_key_is_on_the_page(rendered: str):
    for name, section in Recipe():
        part = rendered.split(f"\n## {name}\n")[1].split("\n## ")[0]
        for key in type(section).model_fields:
            assert f"| `{key}" in part


@pytest.mark.parametrize(
    "row",
    [
        "| `steps` | integer | `1244` | optimizer steps; ≥ 1, ≤ 2147483647 |",
        "| `clip_norm` | number or null | `null` | clip the global gradient norm; off when null; > 0 |",
        "| `targets` | list of text | `[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]` |  |",
        "| `mode` | `lora` or `full` | `lora` |  |",
    ],
)
def test_a_row_gives_type_default_meaning_and_bounds(rendered: str, row: str):
    assert row in rendered.splitlines()

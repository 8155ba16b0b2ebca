"""The table of families: grids, texts, and the split of points into trained on and held out."""

import re
from collections import Counter

import pytest

from gemma_ray.data.verilog.dataset import record
from gemma_ray.data.verilog.families import FAMILIES
from gemma_ray.data.verilog.family import Family, check_family, inp, out
from gemma_ray.data.verilog.golden import combinational
from gemma_ray.data.verilog.split import point_key, split

EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def normalised(text: str) -> str:
    return " ".join(text.split())


@EACH_FAMILY
def test_every_value_of_a_held_out_point_is_trained_on(family: Family):
    parts = split(family)
    trained = {item for p in parts.training for item in p.items()}
    assert parts.heldout
    assert {item for p in parts.heldout for item in p.items()} <= trained


@EACH_FAMILY
def test_a_point_is_either_trained_on_or_held_out(family: Family):
    parts = split(family)
    keys = Counter(point_key(family, p) for p in (*parts.training, *parts.heldout))
    assert keys == Counter(point_key(family, p) for p in family.points)
    assert set(keys.values()) == {1}
    assert 0.1 <= len(parts.heldout) / len(family.points) <= 0.22


def test_no_two_points_share_a_module_or_a_prompt():
    """Else a held-out answer could be learnt from a training point with other parameters."""
    modules = Counter(normalised(family.module(p)) for family in FAMILIES.values() for p in family.points)
    prompts = Counter(
        normalised(family.prompt(p, i)) for family in FAMILIES.values() for p in family.points for i in range(len(family.requests))
    )
    assert [text for text, count in modules.items() if count > 1] == []
    assert [text for text, count in prompts.items() if count > 1] == []


@EACH_FAMILY
def test_texts_fit_a_small_model(family: Family):
    """Characters stand for tokens: a vocabulary of 1,024 words has about 3.5 of them to a token of these texts."""
    for p in family.points:
        for i in range(len(family.requests)):
            assert len(family.prompt(p, i)) + len(f"```verilog\n{family.module(p)}\n```") <= 600
        assert len(family.explanation(p)) <= 100


@EACH_FAMILY
def test_texts_are_filled_in_and_consistent(family: Family):
    for p in family.points:
        example = record(family, p, 0)
        for text in (example["prompt"], example["response"], family.comment(p, 0)):
            assert "$" not in text
            assert "None" not in text
        assert example["response"].count("```verilog\nmodule TopModule (") == 1
        listed = re.findall(r"^ - (input|output) +(\w+)(?: \((\d+) bits\))?$", example["prompt"], re.MULTILINE)
        declared = re.findall(r"^  (input|output)(?: reg)?(?: \[(\d+):0\])? (\w+),?$", family.module(p), re.MULTILINE)
        assert [(kind, name, int(width or 1)) for kind, name, width in listed] == [
            (kind, name, int(top or 0) + 1) for kind, top, name in declared
        ]


@EACH_FAMILY
def test_phrasings_differ(family: Family):
    p = family.points[0]
    assert len({family.prompt(p, i) for i in range(len(family.requests))}) == len(family.requests) >= 2


def test_a_table_entry_that_cannot_be_split_is_refused():
    entry = Family(
        name="lonely",
        grid={"width": (1, 2)},
        inputs=lambda p: (inp("a", p["width"]),),
        outputs=lambda p: (out("y", p["width"]),),
        requests=("pass a.",),
        reasoning="y is a.",
        body=lambda p: "assign y = a;",
        model=combinational(lambda p, x: {"y": x["a"]}),
    )
    with pytest.raises(ValueError, match="lonely: a grid needs two parameters"):
        check_family(entry)

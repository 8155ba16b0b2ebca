"""The data set on disk: layout, determinism, no leak."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from gemma_ray.data.verilog import FAMILIES, raw_verilog, write_dataset
from gemma_ray.data.verilog.dataset import heldout
from gemma_ray.data.verilog.split import point_key, split
from gemma_ray.errors import DataError

VERILOG_EVAL = Path(__file__).parents[3] / "shared/data/verilog-eval/dataset_spec-to-rtl"
needs_icarus = pytest.mark.skipif(shutil.which("iverilog") is None, reason="Icarus Verilog is not installed")


def normalised(text: str) -> str:
    """Blanks and the module's name do not make a text another."""
    return re.sub(r"\b(module|RefModule|TopModule)\b(?: \w+(?= \())?", "module", " ".join(text.split()))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 examples and 62 problems: two of each family."""
    target = tmp_path_factory.mktemp("verilog") / "data"
    write_dataset(target, examples=400, heldout_problems=62, seed=1)
    return target


def examples(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


@needs_icarus
def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(folder: Path, tmp_path: Path):
    write_dataset(tmp_path / "same", examples=400, heldout_problems=62, seed=1)
    write_dataset(tmp_path / "other", examples=400, heldout_problems=62, seed=2)
    assert bytes_of(tmp_path / "same") == bytes_of(folder)
    assert bytes_of(tmp_path / "other")["train.jsonl"] != bytes_of(folder)["train.jsonl"]


@needs_icarus
def test_the_summary_counts_what_was_written(folder: Path):
    summary = json.loads((folder / "summary.json").read_text())
    written = examples(folder)
    assert summary["examples"] == len(written) == sum(summary["examples_by_family"].values()) == 400
    assert summary["repeated_examples"] == 400 - len({(one["prompt"], one["response"]) for one in written})
    assert (
        summary["heldout_problems"]
        == sum(summary["heldout_by_family"].values())
        == len(list((folder / "heldout").glob("*_prompt.txt")))
        == 62
    )
    assert set(summary["examples_by_family"]) == set(summary["heldout_by_family"]) == set(FAMILIES)
    assert summary["simulator"].startswith("Icarus Verilog 1")
    points = {json.dumps([one["family"], one["parameters"]]) for one in written}
    assert summary["modules_checked"] == len(points) + 62
    assert summary["benches_checked"] == 62


@needs_icarus
def test_nothing_is_repeated_before_a_family_is_used_up(folder: Path):
    by_family: dict[str, list[tuple[str, str]]] = {}
    for one in examples(folder):
        by_family.setdefault(one["family"], []).append((one["prompt"], one["response"]))
    for name, drawn in by_family.items():
        available = len(split(FAMILIES[name]).training) * len(FAMILIES[name].requests)
        assert len(set(drawn)) == min(len(drawn), available)


@needs_icarus
def test_no_held_out_problem_is_in_the_training_texts(folder: Path):
    summary = json.loads((folder / "summary.json").read_text())
    trained = {point_key(FAMILIES[one["family"]], one["parameters"]) for one in examples(folder)}
    assert trained.isdisjoint(summary["heldout_points"].values())
    texts = {normalised(one["prompt"]) for one in examples(folder)}
    answers = {normalised(one["response"].split("```verilog\n")[1].split("\n```")[0]) for one in examples(folder)}
    answers |= {normalised(re.sub(r"//.*\n", "", text)) for text in raw_verilog(4000, 0)}
    for reference in (folder / "heldout").glob("*_ref.sv"):
        prompt = reference.with_name(reference.name.replace("_ref.sv", "_prompt.txt"))
        assert normalised(prompt.read_text()) not in texts
        assert normalised(reference.read_text()) not in answers


@needs_icarus
def test_the_leak_check_would_see_a_training_module(folder: Path):
    """The comparison of the test above finds a module that does occur: the raw corpus holds every training module."""
    raw = {normalised(re.sub(r"//.*\n", "", text)) for text in raw_verilog(12000, 0)}
    first = examples(folder)[0]["response"].split("```verilog\n")[1].split("\n```")[0]
    assert normalised(first) in raw


@needs_icarus
def test_examples_have_the_shape_of_codev_r1(folder: Path):
    for one in examples(folder):
        assert list(one) == ["prompt", "response", "family", "parameters"]
        assert re.fullmatch(
            r"<think>\n[^\n]+\n</think>\n<answer>\n```verilog\nmodule TopModule \(.*endmodule\n```\n</answer>", one["response"], re.DOTALL
        )


@needs_icarus
def test_the_held_out_folder_is_laid_out_as_verilog_eval(folder: Path):
    if not VERILOG_EVAL.is_dir():
        pytest.skip(f"{VERILOG_EVAL} is not there")
    pattern = re.compile(r"(Prob\d{3}_[a-z0-9_]+)_(prompt\.txt|ref\.sv|test\.sv)")
    stray = {"Prob062_bugs_mux2.sv"}  # left in the published set beside Prob062's three files
    for names in ({path.name for path in VERILOG_EVAL.glob("Prob*")} - stray, {path.name for path in (folder / "heldout").iterdir()}):
        matches = [pattern.fullmatch(name) for name in names]
        assert None not in matches
        assert set(Counter(match.group(1) for match in matches if match).values()) == {3}
    for ending, texts in {
        "_prompt.txt": ("module named TopModule", "The module should"),
        "_ref.sv": ("module RefModule",),
        "_test.sv": ("module tb", "TopModule top_module1", "RefModule good1", '"Mismatches: %1d in %1d samples"', "TIMEOUT"),
    }.items():
        for text in texts:
            assert text in (VERILOG_EVAL / f"Prob035_count1to10{ending}").read_text()
            assert all(text in path.read_text() for path in (folder / "heldout").glob(f"*{ending}"))


def test_more_problems_than_are_held_out_are_refused_with_the_number_available(tmp_path: Path):
    available = sum(len(split(family).heldout) for family in FAMILIES.values())
    assert len(heldout(available, 0)) == available
    with pytest.raises(DataError, match=f"heldout_problems = {available + 1}: only {available} combinations"):
        heldout(available + 1, 0)


@needs_icarus
def test_nothing_is_written_when_the_request_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="heldout_problems = 100000"):
        write_dataset(tmp_path / "data", examples=10, heldout_problems=100000, seed=0)
    assert list(tmp_path.iterdir()) == []


def test_raw_verilog_holds_training_modules_and_no_requests():
    texts = raw_verilog(500, 3)
    assert texts == raw_verilog(500, 3)
    assert texts != raw_verilog(500, 4)
    assert len(texts) == 500
    for text in texts:
        assert text.count("endmodule\n") == 1
        assert "TopModule" not in text
        assert "should" not in text
        assert "```" not in text

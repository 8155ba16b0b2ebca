"""Problems in VerilogEval's layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemma_ray.errors import DataError
from gemma_ray.evaluation.benchmarks import load_problems


def test_the_benchmarks_root_means_its_specification_to_rtl_task(verilog_eval: Path) -> None:
    problems = load_problems(verilog_eval)
    assert len(problems) == 156
    assert problems[0].task_id == "Prob001_zero" and problems[-1].task_id == "Prob156_review2015_fancytimer"
    assert "module named TopModule" in problems[0].prompt and problems[0].interface is None


def test_the_completion_task_brings_its_module_headers(verilog_eval: Path) -> None:
    problems = load_problems(verilog_eval / "dataset_code-complete-iccad2023", limit=3)
    assert [p.task_id for p in problems] == ["Prob001_zero", "Prob002_m2014_q4i", "Prob003_step_one"]
    assert all(p.interface and "module TopModule" in p.interface for p in problems)


def test_a_missing_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no folder .*nowhere.*eval\.dataset"):
        load_problems(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no problems"):
        load_problems(tmp_path)


@pytest.mark.parametrize("part", ["prompt.txt", "test.sv", "ref.sv"])
def test_a_problem_that_lacks_a_file_is_named(tiny_dataset: Path, part: str) -> None:
    (tiny_dataset / f"Prob002_not_{part}").unlink()
    with pytest.raises(DataError, match=f"Prob002_not has no Prob002_not_{part}"):
        load_problems(tiny_dataset)


def test_a_bench_without_a_result_line_is_named(tiny_dataset: Path) -> None:
    (tiny_dataset / "Prob003_and_test.sv").write_text("module tb; endmodule\n")
    with pytest.raises(DataError, match=r"Prob003_and_test\.sv.*Mismatches"):
        load_problems(tiny_dataset)

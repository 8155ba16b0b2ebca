"""Functional correctness of generated Verilog: sampling from an endpoint, sandboxed grading, pass@k."""

from gemma_ray.evaluation.evaluate import EvalSummary, GradeMap, evaluate
from gemma_ray.evaluation.grading import Grade, GradeTask, grade

__all__ = ["EvalSummary", "Grade", "GradeMap", "GradeTask", "evaluate", "grade"]

"""metrics.jsonl: one line a step."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from gemma_ray.artifacts import write_text


@dataclass(frozen=True)
class StepMetrics:
    """What a step did. `tokens_per_s` counts the batch's tokens without padding; `step_s` of a start's first step includes compilation."""

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_s: float
    loss_tokens: int
    step_s: float


class MetricsFile:
    """Appends steps to a file. Opening it for a resumed run drops the steps after the checkpoint, and a line that a kill cut short."""

    def __init__(self, path: Path, resume_after: int):
        self.path = path
        kept = [m for m in read_metrics(path) if m.step <= resume_after]
        write_text(path, "".join(json.dumps(asdict(m)) + "\n" for m in kept))

    def append(self, metrics: StepMetrics) -> None:
        """Write one step."""
        with self.path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(asdict(metrics)) + "\n")


def read_metrics(path: Path) -> list[StepMetrics]:
    """The steps in a metrics file; none where there is no file. A last line that is cut short is left out."""
    steps: list[StepMetrics] = []
    if not path.exists():
        return steps
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            steps.append(StepMetrics(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            break
    return steps

"""metrics.jsonl: one line a step."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from gemma_ray.artifacts import write_text
from gemma_ray.errors import ResourceError
from gemma_ray.training.claim import Claim


@dataclass(frozen=True)
class StepMetrics:
    """What a step did. `step_s` of a start's first step includes compilation.

    `loss` is the trained scope's mean in nats; `loss_SCOPE` the mean in each scope on the same batch, None where it has no token of it.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_s: float
    """The batch's tokens without padding."""
    loss_tokens: int
    step_s: float
    padded_tokens_per_s: float | None = None
    """With padding."""
    loss_full: float | None = None
    loss_assistant: float | None = None
    loss_final_answer: float | None = None
    mfu: float | None = None
    """Share of the devices' peak that useful tokens' matrix products and attention took; None where the peak is not known."""
    compute_s: float | None = None
    """Part of `step_s` in which the step ran on the devices; the rest waited for the host."""
    input_s: float | None = None
    """Time of the host spent on the batch; it overlaps the step before, so it costs only where `compute_s` is less than `step_s`."""
    checkpoint_s: float | None = None
    """The same for saving."""
    skipped: bool = False
    """The batch was bad and the weights were left as they were."""
    eval_loss: float | None = None
    """After this step, where it was evaluated, in the trained scope; then by scope."""
    eval_loss_full: float | None = None
    eval_loss_assistant: float | None = None
    eval_loss_final_answer: float | None = None


class MetricsFile:
    """Appends steps to a file. Opening it for a resumed run drops the steps after the checkpoint, and damaged lines."""

    def __init__(self, path: Path, resume_after: int, claim: Claim):
        self.path, self.claim = path, claim
        kept = [m for m in read_metrics(path) if m.step <= resume_after]
        write_text(path, "".join(json.dumps(asdict(m)) + "\n" for m in kept))

    def append(self, metrics: StepMetrics) -> None:
        """Write one step. Raises ResourceError when the disk does not take it, StageError when the claim is lost."""
        self.claim.check()
        try:
            with self.path.open("a", encoding="utf-8") as f:
                f.write(json.dumps(asdict(metrics)) + "\n")
        except OSError as e:
            raise ResourceError(
                f"{self.path}: step {metrics.step} cannot be written ({e.strerror}). Make room there, and run it again"
            ) from e


def read_metrics(path: Path) -> list[StepMetrics]:
    """The steps in a metrics file; none where there is no file. A line that is cut short or damaged is left out."""
    steps: list[StepMetrics] = []
    if not path.exists():
        return steps
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            steps.append(StepMetrics(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return steps

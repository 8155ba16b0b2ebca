"""TensorBoard and Weights & Biases, through Tunix's logger. metrics.jsonl is written whatever is on here.

Tunix's own defaults log to W&B whenever its package happens to be installed (sft/metrics_logger.py), which a run should be asked about.
"""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from tunix.sft.metrics_logger import MetricsLogger, MetricsLoggerOptions, Mode, TensorboardBackend, WandbBackend

from gemma_ray.errors import ToolError
from gemma_ray.training.config import TrainConfig
from gemma_ray.training.metrics import StepMetrics

EVAL = "eval_"


class Boards(MetricsLogger):
    """Draws every number of a step."""

    def write(self, metrics: StepMetrics) -> None:
        """Log a step; evaluations under `eval`, all else under `train`."""
        for name, value in asdict(metrics).items():
            if name != "step" and value is not None:
                mode = Mode.EVAL if name.startswith(EVAL) else Mode.TRAIN
                self.log("", name.removeprefix(EVAL), float(value), mode, metrics.step)


def boards(out: Path, config: TrainConfig) -> Boards:
    """The boards that a recipe asks for; TensorBoard's files go to `out/tensorboard`.

    Raises ToolError when `train.wandb_project` is set and wandb is not installed.
    """
    wanted = []
    if config.tensorboard:
        wanted.append(lambda: TensorboardBackend(log_dir=str(out / "tensorboard")))
    if config.wandb_project is not None:
        if find_spec("wandb") is None:
            raise ToolError("train.wandb_project is set and wandb is not installed; `pip install wandb`, or leave it out")
        wanted.append(lambda: WandbBackend(project=config.wandb_project, name=out.name))
    return Boards(MetricsLoggerOptions(log_dir=str(out), backend_kwargs={"custom_backend": wanted}) if wanted else None)

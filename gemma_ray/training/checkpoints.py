"""Reading a run's Orbax checkpoints on one host, without a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemma_ray.errors import CheckpointError
from gemma_ray.training.config import LoraConfig


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in host memory: parameters by Tunix path (only A and B for LoRA), and how they were trained."""

    step: int
    mode: str
    lora: LoraConfig
    parameters: dict[str, np.ndarray]


def latest_step(folder: Path) -> int | None:
    """The newest whole checkpoint's step, None when there is none. Unfinished ones carry another name and do not count."""
    steps = [int(p.name) for p in folder.iterdir() if p.is_dir() and p.name.isdigit()] if folder.is_dir() else []
    return max(steps, default=None)


def read_checkpoint(folder: Path, step: int | None = None) -> Checkpoint:
    """Read a checkpoint, the newest unless `step` is given.

    Raises CheckpointError when there is none, or it is damaged or of an unknown kind.
    """
    import orbax.checkpoint as ocp

    step = latest_step(folder) if step is None else step
    if step is None or not (folder / str(step)).is_dir():
        wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise CheckpointError(f"{folder}: no {wanted}; run `gemma-ray train` first")
    handlers = {"model_params": ocp.PyTreeCheckpointHandler()}
    try:
        with ocp.CheckpointManager(folder.absolute(), item_handlers=handlers) as manager:
            saved = manager.metadata(step).custom_metadata or {}
            shapes = manager.item_metadata(step)["model_params"].tree
            as_numpy = _map_leaves(shapes, lambda _: ocp.RestoreArgs(restore_type=np.ndarray))
            tree = manager.restore(step, args=ocp.args.Composite(model_params=ocp.args.PyTreeRestore(restore_args=as_numpy)))[
                "model_params"
            ]
    except (ValueError, KeyError, FileNotFoundError, TypeError) as e:
        raise CheckpointError(f"{folder / str(step)}: cannot be read ({str(e).splitlines()[0]}); remove it to use an older one") from e
    if "lora" not in saved:
        raise CheckpointError(f"{folder / str(step)}: holds no adapter definition; it was not written by `gemma-ray train`")
    return Checkpoint(step, saved["mode"], LoraConfig.model_validate(saved["lora"]), dict(_flat(tree)))


def _map_leaves(tree: Any, fn: Any) -> Any:
    return {key: _map_leaves(value, fn) for key, value in tree.items()} if isinstance(tree, dict) else fn(tree)


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, np.ndarray]]:
    """Leaves by dotted path; Orbax wraps each nnx variable in a `value` of its own, which is left out."""
    if not isinstance(tree, dict):
        return [(prefix, np.asarray(tree))]
    if set(tree) == {"value"}:
        return _flat(tree["value"], prefix)
    return [leaf for key, value in tree.items() for leaf in _flat(value, f"{prefix}.{key}" if prefix else str(key))]

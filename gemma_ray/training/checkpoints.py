"""Reading a run's Orbax checkpoints on one host, without a mesh, and whether training may continue from the newest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemma_ray.artifacts import read_json
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
    """The newest whole checkpoint's step, None when there is none. Unfinished ones carry another name and do not count.

    Raises CheckpointError when `folder` is a file.
    """
    return next(iter(numbered_steps(folder)), None)


def numbered_steps(folder: Path) -> list[int]:
    """Every step that has a folder, newest first, whole or damaged. Raises CheckpointError when `folder` is a file."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: a file where the folder of checkpoints belongs; move it away")
    steps = [int(p.name) for p in folder.iterdir() if p.is_dir() and p.name.isdigit()] if folder.is_dir() else []
    return sorted(steps, reverse=True)


def whole_steps(folder: Path) -> list[int]:
    """Steps whose metadata can be read and whose parts are there, newest first. Raises CheckpointError when `folder` is a file."""
    return [step for step in numbered_steps(folder) if _is_whole(folder, step)]


def _is_whole(folder: Path, step: int) -> bool:
    try:
        read_metadata(folder, step)
    except CheckpointError:
        return False
    return True


def least_eval_loss(losses: dict[int, float]) -> int | None:
    """The step with the least loss, the earlier one of two; None of none."""
    return min(losses, key=lambda step: (losses[step], step), default=None)


def best_step(folder: Path) -> int | None:
    """The checkpoint with the least evaluation loss; None where none was evaluated."""
    saved = {step: read_metadata(folder, step).get("eval_loss") for step in whole_steps(folder)}
    return least_eval_loss({step: loss for step, loss in saved.items() if loss is not None})


def check_continuable(folder: Path, made_from: dict[str, Any], steps: int) -> None:
    """Look at the newest whole checkpoint, if there is one, before a model is built and anything restored into it.

    Raises CheckpointError when it was trained from something else than `made_from`, naming each difference, or is past `steps`.
    """
    if whole := whole_steps(folder):
        check_same(folder, whole[0], read_metadata(folder, whole[0])["made_from"], made_from, steps)


def check_same(folder: Path, step: int, before: Any, made_from: dict[str, Any], steps: int) -> None:
    """Raise CheckpointError when a checkpoint was made from something else (`before`), naming each difference, or is past `steps`."""
    if differing := differences(before, made_from):
        raise CheckpointError(
            f"{folder}: step {step} was trained otherwise: {'; '.join(differing)}. Set another run.dir, or remove that folder"
        )
    if step > steps:
        raise CheckpointError(
            f"{folder}: holds step {step}, and train.steps is {steps}; set train.steps to {step} or more, or another run.dir"
        )


def differences(before: Any, now: dict[str, Any]) -> list[str]:
    """What differs between the inputs of two trainings, in words; fingerprints are only said to differ."""
    if not isinstance(before, dict):
        return ["by a version that did not write down from what"]
    keys = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    return [
        f"{key} was another" if key in NOT_FOR_PEOPLE else f"{key} was {_shown(before.get(key))}, is {_shown(now.get(key))}" for key in keys
    ]


NOT_FOR_PEOPLE = ("base model", "data")
"""Inputs that are fingerprints."""


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "not set" if value is None else str(value)


def read_metadata(folder: Path, step: int) -> dict[str, Any]:
    """What a checkpoint holds besides arrays. Raises CheckpointError when it cannot be read, or is not one of `gemma-ray train`."""
    path = folder / str(step)
    with unreadable_named(folder, step):
        saved = dict(read_json(path / "_CHECKPOINT_METADATA")["custom_metadata"] or {})
    # Without the optimizer's state Tunix would begin with a fresh one, and not say so.
    parts_there = all((path / item).is_dir() for item in ("model_params", "optimizer_state"))
    if not parts_there or not {"made_from", "data", "mode", "lora"} <= saved.keys():
        raise CheckpointError(f"{path}: not a whole checkpoint of `gemma-ray train`; remove it to use an older one")
    return saved


DAMAGED = "damaged-"
"""What a checkpoint that cannot be read is renamed to, before its step."""

_DAMAGE = (ValueError, KeyError, FileNotFoundError, NotADirectoryError, TypeError, AttributeError, RecursionError)


def reason_unreadable(error: Exception) -> str | None:
    """Why a checkpoint cannot be read, from what Orbax, Tunix or `read_metadata` raised; None for an error that has another cause."""
    if isinstance(error, (CheckpointError, *_DAMAGE)) or type(error) is Exception:  # Orbax's for lost array data
        return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return None


@contextmanager
def unreadable_named(folder: Path, step: int) -> Iterator[None]:
    """Turn what Orbax and Tunix raise on a damaged checkpoint into a CheckpointError that names it."""
    try:
        yield
    except Exception as e:
        why = reason_unreadable(e)
        if why is None or isinstance(e, CheckpointError):
            raise
        raise CheckpointError(f"{folder / str(step)}: cannot be read ({why}); remove it to use an older one") from e


def read_checkpoint(folder: Path, step: int | None = None) -> Checkpoint:
    """Read a checkpoint, the newest unless `step` is given.

    Raises CheckpointError when there is none, or it is damaged or of an unknown kind.
    """
    import orbax.checkpoint as ocp

    step = latest_step(folder) if step is None else step
    if step is None or not (folder / str(step)).is_dir():
        wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise CheckpointError(f"{folder}: no {wanted}; run `gemma-ray train` first")
    saved = read_metadata(folder, step)
    handlers = {"model_params": ocp.PyTreeCheckpointHandler()}
    with unreadable_named(folder, step), ocp.CheckpointManager(folder.absolute(), item_handlers=handlers) as manager:
        shapes = manager.item_metadata(step)["model_params"].tree
        as_numpy = _map_leaves(shapes, lambda _: ocp.RestoreArgs(restore_type=np.ndarray))
        restore = ocp.args.PyTreeRestore(restore_args=as_numpy)
        tree = manager.restore(step, args=ocp.args.Composite(model_params=restore))["model_params"]
        lora = LoraConfig.model_validate(saved["lora"])
    return Checkpoint(step, saved["mode"], lora, dict(_flat(tree)))


def _map_leaves(tree: Any, fn: Any) -> Any:
    return {key: _map_leaves(value, fn) for key, value in tree.items()} if isinstance(tree, dict) else fn(tree)


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, np.ndarray]]:
    """Leaves by dotted path; Orbax wraps each nnx variable in a `value` of its own, which is left out."""
    if not isinstance(tree, dict):
        return [(prefix, np.asarray(tree))]
    if set(tree) == {"value"}:
        return _flat(tree["value"], prefix)
    return [leaf for key, value in tree.items() for leaf in _flat(value, f"{prefix}.{key}" if prefix else str(key))]

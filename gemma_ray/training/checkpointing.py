"""Saving and restoring during training, on Tunix's CheckpointManager, whose traps are mended here.

What is saved is always enough to go on exactly: trained parameters, optimizer state with its step (which dropout's random numbers come
from), the data's position, and what the run was made from. Upstream (google/tunix, sft/checkpoint_manager.py, peft_trainer.py) restores
the newest or fails, drops the metadata of the last save, and starts a fresh optimizer when its state is gone, without a word.

Saving is asynchronous; a checkpoint has its name only when it is whole. The newest are kept, and the one with the least evaluation loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from tunix.sft.checkpoint_manager import CheckpointManager

from gemma_ray.errors import CheckpointError
from gemma_ray.training.checkpoints import DAMAGED, least_eval_loss, numbered_steps, read_metadata, reason_unreadable, whole_steps


class PreemptedError(Exception):
    """This start was told to end and has saved; another one goes on. `preempted` tells whoever starts it."""

    preempted = True


class NewestAndBest:
    """Orbax's policy of which checkpoints stay: the newest `count`, and the best of all that were evaluated."""

    def __init__(self, count: int, eval_losses: dict[int, float]):
        self.count, self.eval_losses = count, eval_losses

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """For each, oldest first."""
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        best = least_eval_loss({step: loss for step, loss in self.eval_losses.items() if step in steps})
        return [step in steps[-self.count :] or step == best for step in steps]


class Checkpoints(CheckpointManager):
    """A run's checkpoints, written and read by all processes together."""

    def __init__(self, folder: Path, every: int, keep: int, note: Callable[[str], None]):
        """Save each `every` steps; `note` gets a line when a damaged checkpoint is left out."""
        self.folder, self.every, self.note = folder, every, note
        self.seconds = 0.0
        """Time that `save` has taken since it was last set to 0."""
        self.eval_losses = {step: loss for step in whole_steps(folder) if (loss := _eval_loss(folder, step)) is not None}
        policy: Any = NewestAndBest(keep, self.eval_losses)
        options = ocp.CheckpointManagerOptions(preservation_policy=policy)
        super().__init__(str(folder.absolute()), options)

    @property
    def orbax(self) -> ocp.CheckpointManager:
        """What Tunix wraps."""
        assert self._checkpoint_manager is not None
        return self._checkpoint_manager

    def save(self, step: int, *args: Any, **kwargs: Any) -> bool:
        """Save where `step` is due, forced, or an end was announced. Raises CheckpointError when it cannot be written, and PreemptedError
        after the save of an announced end."""
        started = time.perf_counter()
        preempted = self.orbax.reached_preemption(step)
        due = step % self.every == 0 or kwargs.get("force") or preempted
        saved = False
        try:
            if due and step != self.latest_step():
                saved = super().save(step, *args, **{**kwargs, "force": True})  # Orbax would save the first step too
            if preempted:
                self.orbax.wait_until_finished()
        except Exception as e:
            raise self._unwritable(e) from e
        self.seconds += time.perf_counter() - started
        if preempted:
            raise PreemptedError(f"told to end: saved step {step}")
        return saved

    def close(self) -> None:
        """Wait for what is being written. Raises CheckpointError when it cannot be."""
        try:
            super().close()
        except Exception as e:
            raise self._unwritable(e) from e

    def _unwritable(self, error: Exception) -> Exception:
        """The error to raise for one that came out of a save, this or the one before, which is written in the background."""
        text = str(error)
        told = [
            word for word in ("No space left", "quota", "File too large", "Read-only", "Permission denied") if word.lower() in text.lower()
        ]
        if not told:
            return error
        steps = whole_steps(self.folder)
        kept = f"step {steps[0]} is the newest whole one" if steps else "none is whole"
        return CheckpointError(f"{self.folder}: a checkpoint cannot be written ({told[0]}); {kept}. Make room there, and run it again")

    def restore(self, model: Any, optimizer: Any, only_lora: bool) -> tuple[int, dict[str, Any]]:
        """Put the newest whole checkpoint into model and optimizer; its step (0 for none) and metadata.

        One that cannot be read is renamed to `damaged-STEP`, with a note, and the one before it is tried. Raises CheckpointError when there
        were checkpoints and none can be read.
        """
        damaged = []
        while steps := numbered_steps(self.folder):
            step, why, metadata = steps[0], "", {}
            try:
                metadata = read_metadata(self.folder, step)
                self.maybe_restore(model, optimizer, step, restore_only_lora_params=only_lora)
            except Exception as e:
                why = reason_unreadable(e)
                if why is None:
                    raise
            if not _any_process(bool(why)):
                return step, metadata
            self._set_aside(step)
            damaged.append(step)
            self.note(
                f"checkpoint {step} cannot be read ({why or 'another host could not read it'}); it is now {self.folder / DAMAGED}{step}"
            )
        if damaged:
            raise CheckpointError(f"{self.folder}: none of its checkpoints can be read; remove the folder to train anew")
        return 0, {}

    def _set_aside(self, step: int) -> None:
        if jax.process_index() == 0:
            (self.folder / str(step)).rename(_free_name(self.folder, step))
        _any_process(False)  # nobody looks before it is done
        self.orbax.reload()


def _free_name(folder: Path, step: int) -> Path:
    names = (f"{DAMAGED}{step}{suffix}" for suffix in ("", *(f".{i}" for i in range(1, 1000))))
    return next(folder / name for name in names if not (folder / name).exists())


def _eval_loss(folder: Path, step: int) -> float | None:
    return read_metadata(folder, step).get("eval_loss")


def _any_process(flag: bool) -> bool:
    """Whether the flag is set in any process; all wait for one another."""
    return bool(np.any(multihost_utils.process_allgather(np.array(flag)))) if jax.process_count() > 1 else flag

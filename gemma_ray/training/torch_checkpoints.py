"""Checkpoints of the PyTorch trainer, RUN/checkpoints/<step>/, written by rank 0 and whole or not there at all:

    adapter_model.safetensors, adapter_config.json   the adapter as PEFT writes it: `PeftModel.from_pretrained` reads the folder
    optimizer.safetensors                            AdamW's two moments by parameter
    random.safetensors                               the random states of every rank, for dropout
    state.json                                       step, where the data stands, what it was made from, and the files' SHA-256

Every tensor is whole, not a shard, so a run goes on with another number of GPUs; only dropout then draws other numbers. The schedule is a
function of the step and needs no file. A gather of the frozen weights, which Transformers' own saving does, would move 62 GB a checkpoint.
"""

from __future__ import annotations

import shutil
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gemma_ray.artifacts import file_sha256, read_json, whole_folder, write_json
from gemma_ray.errors import CheckpointError
from gemma_ray.training.checkpoints import check_same, numbered_steps
from gemma_ray.training.torch_model import ADAPTER, trained

STATE, OPTIMIZER, RANDOM = "state.json", "optimizer.safetensors", "random.safetensors"
DEFAULT = "default"
"""PEFT's name for a model's only adapter, which stands in parameters' names and not in files."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Resume:
    """Where to go on: the newest whole checkpoint, if any, and what is wrong with newer ones."""

    folder: Path | None
    step: int
    data: dict[str, Any]
    damaged: tuple[str, ...]


def newest_whole(folder: Path, made_from: dict[str, Any], steps: int) -> Resume:
    """Find the checkpoint to go on from; reads every byte of the one it returns.

    Raises CheckpointError when it was trained from something else than `made_from` or is past `steps`, or there are only damaged ones.
    """
    damaged = []
    for step in numbered_steps(folder):
        try:
            state = read_whole(folder / str(step))
        except CheckpointError as e:
            damaged.append(str(e))
            continue
        check_same(folder, step, state["made_from"], made_from, steps)
        return Resume(folder / str(step), step, state["data"], tuple(damaged))
    if damaged:
        raise CheckpointError(f"{damaged[0]}, and there is no older one; remove {folder} to train anew")
    return Resume(None, 0, {}, ())


def read_whole(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's state.json. Raises CheckpointError naming the file that is missing, damaged, or no part of one."""
    try:
        state = read_json(checkpoint / STATE)
        if not {"step", "data", "made_from", "files"} <= state.keys():
            raise CheckpointError(f"{checkpoint}: not a whole checkpoint of train.engine=torch")
        changed = [name for name, digest in state["files"].items() if file_sha256(checkpoint / name) != digest]
    except (OSError, ValueError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{checkpoint}: cannot be read ({str(e).splitlines()[0]})") from e
    if changed:
        raise CheckpointError(f"{checkpoint / changed[0]}: not the bytes that were saved")
    return state


def save(folder: Path, model: Any, optimizer: Any, state: dict[str, Any], ranks: int, keep: int) -> None:
    """Write RUN/checkpoints/<state's step> and remove the oldest beyond `keep`; every rank calls it, rank 0 writes.

    `model` is the PeftModel, `state` holds step, data and made_from.
    """
    parameters = trained(model)
    adapter = {name: _whole(p.detach()) for name, p in parameters.items()}
    moments = {f"{moment}/{name}": _whole(optimizer.state[p][moment]) for name, p in parameters.items() for moment in MOMENTS}
    random = _gathered_random(ranks)
    if not random:
        return
    target = folder / str(state["step"])
    with whole_folder(target) as temporary:
        save_adapter(temporary, model, adapter)
        save_file(moments, temporary / OPTIMIZER)
        save_file(random, temporary / RANDOM)
        files = {path.name: file_sha256(path) for path in sorted(temporary.iterdir())}
        write_json(temporary / STATE, {**state, "ranks": ranks, "files": files})
    older = sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit() and int(p.name) < state["step"])
    for step in older[: max(0, len(older) - keep + 1)]:
        shutil.rmtree(folder / str(step), ignore_errors=True)


def save_adapter(folder: Path, model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Write an adapter as PEFT does. Its own `save_pretrained` writes an empty one, and does not say so, once FSDP has wrapped layers."""
    config = copy(model.peft_config[DEFAULT])
    config.inference_mode, config.target_modules = True, sorted(config.target_modules)
    config.save_pretrained(str(folder))
    save_file({name.replace(f".{DEFAULT}.", "."): tensor for name, tensor in tensors.items()}, folder / ADAPTER, {"format": "pt"})


def restore_optimizer(checkpoint: Path, step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer of the trained parameters, sharded or not, the moments that were saved."""
    moments = load_file(checkpoint / OPTIMIZER)
    for name, p in trained(model).items():
        state = {moment: _placed_like(moments[f"{moment}/{name}"], p) for moment in MOMENTS}
        optimizer.state[p] = {"step": torch.tensor(float(step)), **state}


def restore_random(checkpoint: Path, rank: int) -> None:
    """Continue the rank's random numbers; a rank that the checkpoint does not know keeps its own."""
    states = load_file(checkpoint / RANDOM)
    if f"cpu/{rank}" in states:
        torch.set_rng_state(states[f"cpu/{rank}"])
    if f"cuda/{rank}" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[f"cuda/{rank}"])


def _whole(tensor: Any) -> torch.Tensor:
    """A tensor gathered from its shards, on the CPU and of its own memory."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().to("cpu", copy=True).contiguous()


def _placed_like(whole: torch.Tensor, parameter: Any) -> torch.Tensor:
    if not hasattr(parameter, "placements"):
        return whole.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(parameter.device), parameter.device_mesh, parameter.placements)


def _gathered_random(ranks: int) -> dict[str, torch.Tensor]:
    """The random states of all ranks on rank 0, nothing on the others."""
    mine = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        mine["cuda"] = torch.cuda.get_rng_state()
    everyone: list[Any] = [mine]
    if ranks > 1:
        rank = torch.distributed.get_rank()
        gathered: list[Any] | None = [None] * ranks if rank == 0 else None
        torch.distributed.gather_object(mine, gathered)
        everyone = gathered or []
    return {f"{kind}/{rank}": state for rank, states in enumerate(everyone) for kind, state in states.items()}

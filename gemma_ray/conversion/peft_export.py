"""A PEFT checkpoint of `train.engine=torch` as Hugging Face files: the base with the adapter merged in.

What PEFT's `merge_and_unload` gives, without a model in memory: a tensor at a time is read from the base, s · B·A is added in float64, and
the sum is rounded once to the base's dtype. s is alpha / rank, or alpha / √rank for rank-stabilised LoRA.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from gemma_ray.artifacts import read_json, whole_folder, write_json
from gemma_ray.conversion.config import ConvertConfig
from gemma_ray.conversion.export import COMPANIONS, Export, _write_shards
from gemma_ray.errors import CheckpointError
from gemma_ray.models.gemma4 import read_text_config
from gemma_ray.models.loading import TensorFiles, check_complete
from gemma_ray.models.parameter_map import gemma4_rows

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _A, _B = "base_model.model.model.", ".lora_A.weight", ".lora_B.weight"


def is_peft(checkpoint: Path) -> bool:
    """Whether a checkpoint's folder is PEFT's."""
    return (checkpoint / CONFIG).is_file()


def export_peft(base: Path, checkpoint: Path, out: Path, config: ConvertConfig) -> Export:
    """Write the merged model of a checkpoint to `out`.

    Raises CheckpointError when the checkpoint is damaged or does not belong to this base, ModelError when the base's files are incomplete.
    """
    adapter, updates = _read(checkpoint)
    with TensorFiles(base) as files, whole_folder(out) as temporary:
        check_complete(files, gemma4_rows(read_text_config(base)))
        strangers = sorted(name for name in updates if f"{files.prefix}{name}" not in files.file_of)
        if strangers:
            raise CheckpointError(f"{checkpoint}: adapts {len(strangers)} tensors that this base has not, the first: {strangers[0]}")
        shards = _write_shards(_merged(files, updates, _scale(adapter)), temporary, config.max_shard_bytes)
        for name in COMPANIONS:
            if (base / name).exists():
                shutil.copyfile(base / name, temporary / name)
        write_json(temporary / "provenance.json", {"step": int(checkpoint.name), "mode": "lora", "lora": _definition(adapter)})
        size = sum(p.stat().st_size for p in temporary.glob("*.safetensors"))
    return Export(out, int(checkpoint.name), shards, size, changed=len(updates), copied=len(files.file_of) - len(updates))


def _read(checkpoint: Path) -> tuple[dict[str, Any], dict[str, tuple[np.ndarray, np.ndarray]]]:
    """adapter_config.json, and A [rank, in] and B [out, rank] by the base's tensor, without the files' prefix."""
    try:
        adapter, tensors = read_json(checkpoint / CONFIG), load_file(checkpoint / TENSORS)
        names = [name.removesuffix(_A) for name in tensors if name.endswith(_A)]
        updates = {f"{name.removeprefix(_PREFIX)}.weight": (tensors[name + _A], tensors[name + _B]) for name in names}
        _scale(adapter)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as e:
        raise CheckpointError(f"{checkpoint}: cannot be read ({e}); remove it to use an older one") from e
    return adapter, updates


def _scale(adapter: dict[str, Any]) -> float:
    return adapter["lora_alpha"] / (math.sqrt(adapter["r"]) if adapter["use_rslora"] else adapter["r"])


def _definition(adapter: dict[str, Any]) -> dict[str, Any]:
    return {"rank": adapter["r"], "alpha": adapter["lora_alpha"], "targets": adapter["target_modules"]}


def _merged(files: TensorFiles, updates: dict[str, tuple[np.ndarray, np.ndarray]], scale: float) -> Iterator[tuple[str, np.ndarray]]:
    for name in sorted(files.file_of):
        weight = files.read(name)
        update = updates.get(name.removeprefix(str(files.prefix)))
        if update is not None:
            a, b = (part.astype(np.float64) for part in update)
            if (b.shape[0], a.shape[1]) != weight.shape:
                wanted = f"the adapter gives {[b.shape[0], a.shape[1]]}, the base has {list(weight.shape)}"
                raise CheckpointError(f"{name}: {wanted}; they are different models")
            weight = (weight.astype(np.float64) + scale * (b @ a)).astype(weight.dtype)
        yield name, np.ascontiguousarray(weight)

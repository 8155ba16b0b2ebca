"""A trained checkpoint as Hugging Face files: the base with its adapter merged in, or a full checkpoint.

Works a tensor at a time: read from the base, add alpha/rank · A·B in float64, round once to the base's dtype, write. Tensors that
training did not touch are copied as they are. Files are cut at `max_shard_bytes`; the folder appears whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from gemma_ray.artifacts import whole_folder, write_json
from gemma_ray.conversion.config import ConvertConfig
from gemma_ray.errors import CheckpointError, ModelError
from gemma_ray.models.gemma4 import read_text_config
from gemma_ray.models.loading import TensorFiles, check_complete
from gemma_ray.models.parameter_map import Row, gemma4_rows, lora_update
from gemma_ray.training.checkpoints import Checkpoint, read_checkpoint

COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)
"""Files beside the weights that an exported model needs too; copied when the base has them."""


@dataclass(frozen=True)
class Export:
    """What an export wrote: the step it came from, its files, and how many tensors were changed and how many copied."""

    folder: Path
    step: int
    files: int
    bytes: int
    changed: int
    copied: int


def export(base: Path, checkpoints: Path, out: Path, config: ConvertConfig, step: int | None = None) -> Export:
    """Write the model of a checkpoint (the newest, unless `step` is given) to `out`.

    Raises CheckpointError when the checkpoint does not belong to this base, ModelError when the base's files are incomplete.
    """
    checkpoint = read_checkpoint(checkpoints, step)
    rows = gemma4_rows(read_text_config(base))
    with TensorFiles(base) as files, whole_folder(out) as temporary:
        check_complete(files, rows)
        changes = _Changes(checkpoint, rows)
        shards = _write_shards(_tensors(files, rows, changes), temporary, config.max_shard_bytes)
        for name in COMPANIONS:
            if (base / name).exists():
                shutil.copyfile(base / name, temporary / name)
        write_json(
            temporary / "provenance.json",
            {"step": checkpoint.step, "mode": checkpoint.mode, "lora": checkpoint.lora.model_dump(mode="json")},
        )
        changes.check_all_used()
        size = sum(p.stat().st_size for p in temporary.glob("*.safetensors"))
    return Export(out, checkpoint.step, shards, size, changed=changes.changed, copied=len(files.file_of) - changes.changed)


class _Changes:
    """What a checkpoint does to a row's tensors; remembers what was used, so that nothing trained is left behind in silence."""

    def __init__(self, checkpoint: Checkpoint, rows: list[Row]):
        self.parameters = checkpoint.parameters
        self.full = checkpoint.mode == "full"
        self.scale = checkpoint.lora.scale
        self.unused = set(checkpoint.parameters)
        self.changed = 0
        known = {row.tunix for row in rows} if self.full else {name for row in rows if row.layout.lora for name in row.lora_names()}
        strangers = sorted(self.unused - known)
        if strangers:
            raise CheckpointError(
                f"the checkpoint has {len(strangers)} parameters that this base has not, the first: {', '.join(strangers[:3])}"
            )

    def apply(self, row: Row, tensors: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """The row's tensors after training, in their own dtype; the very same arrays when training did not touch them."""
        if self.full:
            self.unused.discard(row.tunix)
            if row.tunix not in self.parameters:
                raise CheckpointError(f"the full checkpoint lacks {row.tunix}")
            trained = row.layout.to_hf(self.parameters[row.tunix])
        else:
            a, b = row.lora_names()
            if row.layout.lora is None or a not in self.parameters:
                return tensors
            self.unused -= {a, b}
            deltas = lora_update(row, self.parameters[a], self.parameters[b], self.scale)
            for name, w, delta in zip(row.hf, tensors, deltas, strict=True):
                _check_shape(name, w, delta)
            trained = tuple(w.astype(np.float64) + delta for w, delta in zip(tensors, deltas, strict=True))
        self.changed += len(tensors)
        return tuple(np.ascontiguousarray(new.astype(old.dtype)) for new, old in zip(trained, tensors, strict=True))

    def check_all_used(self) -> None:
        if self.unused:
            raise CheckpointError(f"{len(self.unused)} trained parameters went nowhere, the first: {sorted(self.unused)[0]}")


def _check_shape(name: str, old: np.ndarray, new: np.ndarray) -> None:
    if new.shape != old.shape:
        raise CheckpointError(f"{name}: the checkpoint gives {list(new.shape)}, the base has {list(old.shape)}; they are different models")


def _tensors(files: TensorFiles, rows: list[Row], changes: _Changes) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the exported model, a row at a time, then those of the base that no row owns."""
    owned = set()
    for row in rows:
        names = [f"{files.prefix}{name}" for name in row.hf]
        owned.update(names)
        before = tuple(files.read(name) for name in names)
        after = changes.apply(row, before)
        for name, old, new in zip(names, before, after, strict=True):
            _check_shape(name, old, new)
            yield name, new
    for name in sorted(files.file_of.keys() - owned):
        yield name, files.read(name)


def _write_shards(tensors: Iterator[tuple[str, np.ndarray]], folder: Path, max_bytes: int) -> int:
    """Write tensors to numbered safetensors files with an index, holding one file's tensors in memory at a time."""
    parts: list[list[str]] = []
    pending: dict[str, np.ndarray] = {}
    total = 0

    def flush() -> None:
        save_file(pending, folder / f"part-{len(parts)}", metadata={"format": "pt"})
        parts.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > max_bytes:
            flush()
        pending[name] = tensor
        total += tensor.nbytes
    if not pending and not parts:
        raise ModelError(f"{folder}: nothing to write")
    flush()
    weight_map: dict[str, str] = {}
    for i, names in enumerate(parts):
        final = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"part-{i}").rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return len(parts)

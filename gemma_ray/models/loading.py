"""Base weights from safetensors files into a sharded Tunix model, strictly.

Every parameter of the model is filled exactly once and every tensor of the files is either used or known not to belong to the text model;
anything else is an error that names it. Each process reads a tensor when it needs it and keeps only its own shards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from gemma_ray.errors import ModelError
from gemma_ray.models.parameter_map import PREFIXES, Row

KNOWN_UNUSED = re.compile(r"(^|\.)(vision_tower|embed_vision|audio_tower|embed_audio|multi_modal_projector)\.|^lm_head\.weight$")
"""Tensors of the official files that text training does not touch: the vision and audio towers, and the tied output head."""


class TensorFiles:
    """The tensors of a model folder by name, read one at a time. Use as a context manager."""

    def __init__(self, folder: Path):
        """Raises ModelError when there is no safetensors file, one is damaged, or a name occurs twice."""
        self.folder = folder
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ModelError(f"{folder}: no *.safetensors files; model.source must be a folder with Hugging Face files")
        self._stack = ExitStack()
        self.file_of: dict[str, Any] = {}
        for path in paths:
            try:
                file = self._stack.enter_context(safe_open(path, framework="numpy"))
            except (SafetensorError, OSError) as e:
                self.close()
                raise ModelError(f"{path}: not a whole safetensors file ({e}); fetch it, or remove its folder and convert, again") from e
            for name in file.keys():  # noqa: SIM118 - safe_open is not a dict
                if name in self.file_of:
                    self.close()
                    raise ModelError(f"{path}: tensor '{name}' is also in another file of {folder}")
                self.file_of[name] = file
        self.prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in self.file_of), None)

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def read(self, name: str) -> np.ndarray:
        """One tensor, by its name in the file."""
        return self.file_of[name].get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        return tuple(self.file_of[name].get_slice(name).get_shape())

    def read_row(self, row: Row, shape: tuple[int, ...]) -> np.ndarray:
        """A row's Tunix parameter. Raises ModelError when the tensors do not have the shapes that belong to `shape`."""
        import jax

        names = [f"{self.prefix}{name}" for name in row.hf]
        wanted = jax.eval_shape(row.layout.to_hf, jax.ShapeDtypeStruct(shape, np.float32))
        if [self.shape(name) for name in names] != [tensor.shape for tensor in wanted]:
            found = ", ".join(f"{name} {list(self.shape(name))}" for name in names)
            raise ModelError(f"{self.folder}: {found} does not fit {row.tunix} {list(shape)}; config.json and weights disagree")
        return row.layout.to_tunix(*(self.read(name) for name in names), shape=shape)


def check_complete(files: TensorFiles, rows: Iterable[Row], unread: Iterable[str] = ()) -> None:
    """Raise ModelError unless the files hold exactly the rows' tensors, and others that are known not to matter: those of other parts,
    and those named in `unread` (`parameter_map.unread_tensors`)."""
    if files.prefix is None:
        known = " or ".join(f"{p}embed_tokens.weight" for p in PREFIXES)
        raise ModelError(f"{files.folder}: neither {known} in the files; they are not a Gemma 4 in Hugging Face's layout")
    wanted = {f"{files.prefix}{name}" for row in rows for name in row.hf}
    missing = sorted(wanted - files.file_of.keys())
    if missing:
        raise ModelError(f"{files.folder}: {len(missing)} tensors are missing, the first: {', '.join(missing[:3])}")
    others = files.file_of.keys() - wanted - {f"{files.prefix}{name}" for name in unread}
    unknown = sorted(name for name in others if not KNOWN_UNUSED.search(name))
    if unknown:
        raise ModelError(f"{files.folder}: {len(unknown)} tensors belong to no parameter, the first: {', '.join(unknown[:3])}")


def load_state(folder: Path, rows: list[Row], abstract: dict[str, Any], unread: Iterable[str] = ()) -> dict[str, Any]:
    """Read base weights: Tunix path → global array.

    `abstract` maps each Tunix path to a `jax.ShapeDtypeStruct` with the sharding to place it in. Weights are cast to its dtype.
    `unread` is as of `check_complete`.
    Raises ModelError for missing, unknown or misshapen tensors, and when `abstract` and `rows` name different parameters.
    """
    import jax

    by_path = {row.tunix: row for row in rows}
    if by_path.keys() != abstract.keys():
        differing = sorted(by_path.keys() ^ abstract.keys())
        raise ModelError(f"the parameter map and the model disagree on {len(differing)} parameters, the first: {', '.join(differing[:3])}")
    state = {}
    with TensorFiles(folder) as files:
        check_complete(files, rows, unread)
        for path, target in abstract.items():
            host = files.read_row(by_path[path], target.shape)
            state[path] = jax.make_array_from_callback(
                target.shape, target.sharding, lambda index, host=host, dtype=target.dtype: np.ascontiguousarray(host[index]).astype(dtype)
            )
    return state

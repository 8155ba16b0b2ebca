"""Telling one model folder from another without reading every byte."""

from __future__ import annotations

import hashlib
from pathlib import Path

from gemma_ray.artifacts import fingerprint
from gemma_ray.models.gemma4 import read_object


def model_fingerprint(folder: Path) -> str:
    """16 hex digits from config.json and, for each safetensors file, its header, its size and its first and last MiB.

    Raises ModelError when config.json is missing or damaged.
    """
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest = hashlib.sha256()
        with path.open("rb") as f:
            digest.update(f.read(1 << 20))
            f.seek(max(0, size - (1 << 20)))
            digest.update(f.read())
        files[path.name] = [size, digest.hexdigest()]
    return fingerprint([read_object(folder / "config.json"), files])

"""Whose a run is: the start that came last. One that has been replaced stops before its next line or checkpoint, and writes no more.

A host that is cut off from its cluster, or outlives its Ray node for some seconds, goes on training while the start that takes its place
writes the same files. Process 0 asks before every step's line, which comes before that step's checkpoint.
"""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

from gemma_ray.artifacts import write_text
from gemma_ray.errors import StageError


class Claim:
    """On the folder that a run writes, from now until another start makes one. Make it before anything is read there."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.text = folder / "claim", f"{socket.gethostname()} pid {os.getpid()} {uuid.uuid4().hex}\n"
        write_text(self.path, self.text)

    def check(self) -> None:
        """Raises StageError when another start has made one since, or the folder was removed."""
        if not self.path.exists():
            raise StageError(f"{self.path}: removed while this start trained; the same command goes on from the newest checkpoint")
        found = self.path.read_text(encoding="utf-8")
        if found != self.text:
            raise StageError(f"{self.path}: the run now belongs to {found.strip()}; this start of it has stopped and wrote nothing since")

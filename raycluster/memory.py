"""How much memory this process may still take."""

from __future__ import annotations

import contextlib
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
# (limit, used), version 2 and version 1 of Linux's control groups.
_CGROUP_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def available_memory_bytes() -> int:
    """Bytes that a new process can take: the kernel's estimate, or what is left of the container's limit when that is less."""
    import psutil

    candidates = [psutil.virtual_memory().available]
    for limit, used in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # no such group, or no limit ("max")
            candidates.append(int((CGROUP / limit).read_text()) - int((CGROUP / used).read_text()))
    return min(candidates)

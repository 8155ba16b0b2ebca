"""The process that compiles: reads a job, does it, writes what came of it, and ends with its parent however that ends."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemma_ray.errors import GemmaRayError
from gemma_ray.planning.job import Compiled, CompiledForward, CompileJob, ForwardJob


def serve_job(kind: type[CompileJob] | type[ForwardJob], work: Callable[[Any], Compiled | CompiledForward]) -> None:
    """`python -m MODULE JOB.json RESULT.json`, its standard input a pipe that the parent holds."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job = kind.from_json(json.loads(Path(sys.argv[1]).read_text()))
    try:
        made = work(job).to_json()
    except GemmaRayError as e:
        made = {"refused": str(e)}
    Path(sys.argv[2]).write_text(json.dumps(made))


def _end_with_parent() -> None:
    sys.stdin.read()  # until the parent closes its end, or is gone
    os._exit(1)

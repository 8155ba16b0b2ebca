"""Build the Python environment that `gemma-ray plan` compiles in, as a plan does on first use, and say where it is: `make plan-env`."""

from __future__ import annotations

import sys

from gemma_ray.planning.environment import plan_python
from gemma_ray.recipe import Recipe
from workloads.command import reported
from workloads.progress import Progress

with reported(debug=False):
    sys.stdout.write(f"{plan_python(Recipe().run.cache_path, Progress().note)}\n")

"""The 31B training step in several ways, compiled whole for v5p 2x2x1: `python benchmarks/plan_variants.py`.

Prints the table of docs/planning.md. Everything is a prediction. Four to six minutes a row on one core; what was compiled before is read
from the cache.
"""

from __future__ import annotations

import sys

from gemma_ray.errors import RecipeError
from gemma_ray.planning.hardware import GIB
from gemma_ray.recipe import load_recipe
from workloads import plan
from workloads.progress import Progress

BASE = ("data.max_seq_len=4096", "train.batch_size=4", "train.micro_batches=1", "run.dir=runs/plan-variants")
VARIANTS = (
    # fsdp, tp, remat
    (1, 4, "none"),
    (1, 4, "norms"),
    (1, 4, "elementwise"),
    (1, 4, "layer"),
    (2, 2, "norms"),
    (4, 1, "norms"),
)


def main() -> None:
    """Print a Markdown table, a row a variant."""
    print("| mesh | remat | memory a device, GiB of 95 | XLA's estimate, tokens/s | predicted, tokens/s | links, GB | compiled in |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for fsdp, tp, remat in VARIANTS:
        recipe = load_recipe("gemma4-31b-v5p8", [*BASE, f"mesh.fsdp={fsdp}", f"mesh.tp={tp}", f"train.remat={remat}"])
        name = f"| fsdp={fsdp} tp={tp} | {remat} "
        try:
            t = plan.run(recipe, Progress()).train
        except RecipeError as e:
            print(f"{name}| does not compile: {e} |")
            continue
        if t is None or t.xla_tokens_per_s is None:
            sys.exit("nothing was compiled")
        used, host = t.device_bytes.total / GIB, f"{t.compile_s:.0f} s, {t.compile_host_bytes / GIB:.1f} GiB"
        print(
            f"{name}| {used:.1f} ({used * GIB / t.hbm_bytes:.0%}){'' if t.fits else ', too much'} | {t.xla_tokens_per_s:,.0f} "
            f"| {t.predicted_tokens_per_s:,.0f} | {t.collective_bytes / 1e9:.0f} | {host} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

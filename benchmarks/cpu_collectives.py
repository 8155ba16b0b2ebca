"""Step time of the tiny model on an emulated 2 × 2 mesh of one process: collectives over gloo, and in the process.

    python benchmarks/cpu_collectives.py

Runs each in a process of its own, in turn and twice, and prints the median step time in seconds, compilation left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

STEPS, BATCH, LENGTH = 30, 4, 256


def measure(implementation: str | None) -> list[float]:
    """Step times in this process."""
    import socket

    import jax

    jax.config.update("jax_cpu_collectives_implementation", implementation)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)

    from gemma_ray.data.prepare import prepare_text
    from gemma_ray.data.verilog import raw_verilog
    from gemma_ray.models.gemma4 import PRESETS
    from gemma_ray.models.tiny import write_initial_model
    from gemma_ray.models.tokenizer import train_tokenizer
    from gemma_ray.training.config import LoraConfig, MeshConfig, TrainConfig
    from gemma_ray.training.loop import TrainJob, train
    from gemma_ray.training.metrics import read_metrics

    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        (root / "model").mkdir()
        texts = raw_verilog(500, 0)
        train_tokenizer(texts, PRESETS["gemma4-tiny"]["vocab_size"], root / "model")
        write_initial_model("gemma4-tiny", root / "model", 0)
        prepare_text(texts, root / "model", LENGTH, root / "data")
        settings = TrainConfig(mode="full", steps=STEPS, batch_size=BATCH, warmup_steps=5, checkpoint_every=STEPS)
        job = TrainJob(
            root / "model",
            root / "data",
            root,
            "float32",
            LENGTH,
            MeshConfig(fsdp=2, tp=2),
            settings,
            LoraConfig(),
            {},
        )
        train(job, lambda report: None)
        return [m.step_s for m in read_metrics(root / "metrics.jsonl")][5:-1]


def main() -> None:
    """Run both in turn, twice, and print a line each."""
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1] if sys.argv[1] != "in-process" else None)))
        return
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    times: dict[str, list[float]] = {"gloo": [], "in-process": []}
    for _ in range(2):
        for name in times:
            done = subprocess.run([sys.executable, __file__, name], env=environment, capture_output=True, text=True, check=True)
            times[name] += json.loads(done.stdout.splitlines()[-1])
    for name, steps in times.items():
        print(f"{name:10}  median {median(steps):.3f} s a step  (least {min(steps):.3f}, most {max(steps):.3f}, {len(steps)} steps)")


if __name__ == "__main__":
    main()

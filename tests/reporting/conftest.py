"""Runs with every artifact, numbers made up but of the right shape."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

VERDICTS = ["mismatch", "syntax_error", "compile_error", "no_code", "timeout"]


def put(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def write_evaluation(folder: Path, rng: random.Random, chance: float, model: str) -> None:
    results = []
    for problem in range(40):
        skill = min(1.0, max(0.0, rng.gauss(chance, 0.3)))
        for sample in range(5):
            verdict = "pass" if rng.random() < skill else rng.choice(VERDICTS)
            results.append({"task_id": f"Prob{problem:03d}_adder", "sample": sample, "verdict": verdict, "letter": ".", "detail": ""})
    verdicts: dict[str, int] = {}
    for r in results:
        verdicts[r["verdict"]] = verdicts.get(r["verdict"], 0) + 1
    rate = verdicts.get("pass", 0) / len(results)
    ever = len({r["task_id"] for r in results if r["verdict"] == "pass"}) / 40
    summary = {
        "problems": 40,
        "samples_per_problem": 5,
        "pass@1": {"value": rate, "ci95": [max(0, rate - 0.09), min(1, rate + 0.09)]},
        "pass@5": {"value": ever, "ci95": [max(0, ever - 0.12), min(1, ever + 0.12)]},
        "verdicts": verdicts,
        "simulator": "Icarus Verilog 11.0",
        "set_aside": [],
        "dataset": "built-in:verilog-heldout",
        "model": model,
    }
    put(folder / "summary.json", summary)
    put(folder / "results.jsonl", "".join(json.dumps(r) + "\n" for r in results))


def write_cell(folder: Path, rng: random.Random, context: int, qps: float, requests: int) -> None:
    load = 4 if math.isinf(qps) else qps
    base = (20 + context / 8) * (1 + load**1.5 / 3) * rng.uniform(0.9, 1.1)
    tpot = 9 + load * 1.8 + context / 400

    def spread(median: float, samples: int) -> dict[str, Any]:
        too_few = [name for name, need in (("p90", 10), ("p99", 100)) if samples < need]
        tail = {"p50": median, "p90": median * 1.7, "p99": median * 2.6}
        return {"mean": median * 1.1, **tail, "samples": samples, "too_few": too_few}

    cell = {
        "context": context,
        "qps": "inf" if math.isinf(qps) else qps,
        "requests": requests,
        "completed": requests - 1,
        "failed": 1,
        "duration_s": requests / load,
        "achieved_qps": load * 0.95 / (1 + load / 40),
        "input_tokens": context * (requests - 1),
        "output_tokens": 32 * (requests - 1),
        "output_tokens_per_s": 32 * load * 0.95 / (1 + load / 40),
        "ttft_ms": spread(base, requests - 1),
        "tpot_ms": spread(tpot, requests - 1),
        "itl_ms": spread(tpot, 31 * (requests - 1)),
        "e2e_ms": spread(base + 31 * tpot, requests - 1),
        "errors": {"HTTP 500: engine": 1},
    }
    put(folder / f"{context}_{qps:g}.json", cell)


def write_run(root: Path, seed: int = 0, steps: int = 200, price: float | None = None, emulate: bool = True, requests: int = 120) -> Path:
    rng = random.Random(seed)
    recipe = {
        "model": {"source": "built-in:gemma4-tiny", "dtype": "float32"},
        "lora": {"rank": 16 + 16 * seed, "alpha": 32.0},
        "train": {"steps": steps, "learning_rate": 0.003},
        "cluster": {"accelerator": "v5p", "topology": "2x2x1", "emulate": emulate},
        "cost": {"usd_per_hour": price, "source": "price list, May 2026" if price else None},
    }
    put(root / "recipe.yaml", yaml.safe_dump(recipe, sort_keys=False))
    lines = []
    for step in range(1, steps + 1):
        warm = min(1.0, step / 10)
        lines.append(
            {
                "step": step,
                "loss": 0.25 + 3.4 * math.exp(-step / (28 + 10 * seed)) + rng.gauss(0, 0.05),
                "learning_rate": 3e-3 * warm * 0.5 * (1 + math.cos(math.pi * step / steps)),
                "grad_norm": rng.uniform(0.3, 1.4),
                "tokens_per_s": rng.gauss(2400, 70) if step > 1 else 140.0,
                "loss_tokens": rng.randint(900, 1300),
                "step_s": rng.gauss(1.4, 0.05) if step > 1 else 24.0,
            }
        )
    put(root / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    manifest = {
        "rows_read": 2048,
        "rows_kept": 1987,
        "rows_dropped": {"too_long": 37, "duplicate": 20, "empty_response": 4},
        "tokens": 412345,
        "loss_tokens": 231456,
        "padding_fraction": 0.043,
        "shards": [{"path": "shard-0.arrow", "rows": 1000}, {"path": "shard-1.arrow", "rows": 987}],
    }
    put(root / "data" / "manifest.json", manifest)
    verify = {
        "passed": True,
        "max_abs_logit_diff": 3.1e-5,
        "tolerance": 1e-3,
        "logit_scale": 18.2,
        "positions": 912,
        "prompts": 8,
        "tunix_greedy_equal": 8,
        "vllm_greedy_equal": 8,
        "greedy_match": True,
        "tensors_changed": 42,
        "tensors_equal_to_base": 31,
        "tensors": [{"name": "model.embed_tokens.weight", "max_abs_change": 0.0, "finite": True}],
    }
    put(root / "verify.json", verify)
    write_evaluation(root / "eval-base", rng, 0.08, "base")
    write_evaluation(root / "eval", rng, 0.72 - 0.1 * seed, "tuned")
    for context in (128, 512):
        for qps in (1.0, 2.0, 4.0, math.inf):
            write_cell(root / "bench", rng, context, qps, requests)
    stages = {"prepare": 14.2, "train": 312.4, "convert": 9.8, "verify": 41.0, "serve": 77.5, "eval": 122.3, "bench": 96.0}
    put(root / "timings.json", {"stages": stages, "total_s": sum(stages.values())})
    put(root / "versions.json", {"jax": "0.10.2", "ray": "2.60.0", "vllm": "0.31.0", "machine": {"cpus": 8, "memory_gib": 24.0}})
    put(root / "checkpoints" / "200" / "state" / "manifest.ocdbt", "x" * 3000)
    put(root / "checkpoints" / "200" / "metadata", "{}")
    put(root / "model" / "config.json", "{}")
    return root


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a full run under the test's folder."""

    def make(name: str = "quickstart", **options: Any) -> Path:
        return write_run(tmp_path / name, **options)

    return make

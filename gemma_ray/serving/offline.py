"""Greedy continuations by vLLM's own `LLM` class, without a server: the third opinion that `verify` asks.

vLLM runs in a process of its own (`python -m gemma_ray.serving.offline`), so that JAX and this process's environment do not reach it and a
crash is one error. The question goes in as JSON on stdin, the answer comes back in a file, since vLLM writes to both streams.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gemma_ray.errors import ModelError, StageError
from gemma_ray.serving.checks import check_model_folder
from gemma_ray.serving.deployment import cpu_environment
from gemma_ray.serving.failures import last_exception

KV_CACHE_BYTES = 1 << 30


def generate_greedy(
    model: Path,
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    dtype: str = "float32",
    max_model_len: int | None = None,
    log: Path | None = None,
) -> list[list[int]]:
    """Continuations (token ids) of prompts (token ids) by vLLM on CPU, one a prompt, at most `max_new_tokens` long.

    A continuation that an end token of generation_config.json stopped includes that token, as transformers' `generate` does.
    `max_model_len` is by default what the longest prompt needs; vLLM's output goes to `log`. Raises ModelError for an incomplete folder or
    an empty prompt, StageError when vLLM fails.
    """
    check_model_folder(model, tokenizer=False)
    if not prompts:
        return []
    if not all(prompts):
        raise ModelError("vLLM needs at least one token in every prompt")
    length = max_model_len or max(map(len, prompts)) + max_new_tokens
    question = {"model": str(model), "prompts": prompts, "max_new_tokens": max_new_tokens, "dtype": dtype, "max_model_len": length}
    with tempfile.TemporaryDirectory(prefix="gemma-ray-vllm-") as scratch:
        answer, transcript = Path(scratch) / "answer.json", log or Path(scratch) / "vllm.log"
        transcript.parent.mkdir(parents=True, exist_ok=True)
        with transcript.open("w", encoding="utf-8") as output:
            done = subprocess.run(
                [sys.executable, "-m", "gemma_ray.serving.offline", str(answer)],
                input=json.dumps(question),
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                env={**_environment(), **cpu_environment(1)},
                check=False,
            )
        if done.returncode != 0 or not answer.exists():
            cause = last_exception(transcript) or f"exit code {done.returncode}"
            raise StageError(f"vLLM could not generate from {model}: {cause}" + (f" (log: {log})" if log else ""))
        return json.loads(answer.read_text(encoding="utf-8"))


def _environment() -> dict[str, str]:
    """This process's environment without what steers other runtimes, and with this package importable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_", "TPU_", "VLLM_", "RAY_"))}
    root = str(Path(__file__).resolve().parents[2])
    kept["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [kept.get("PYTHONPATH")])])
    return kept


def _answer(question: dict[str, Any]) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        question["model"],
        skip_tokenizer_init=True,
        dtype=question["dtype"],
        max_model_len=question["max_model_len"],
        enforce_eager=True,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        seed=0,
    )
    sampling = SamplingParams(temperature=0, max_tokens=question["max_new_tokens"], detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in question["prompts"]], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(_answer(json.load(sys.stdin))), encoding="utf-8")

"""The fault of vLLM's that `gemma_ray.serving.deployment.whole_prompt_arguments` works around; when this fails, remove the work-around."""

from __future__ import annotations

from importlib import util
from pathlib import Path

import pytest
import torch

from gemma_ray.serving.config import ServeConfig
from gemma_ray.serving.deployment import engine_arguments


def test_vllm_still_rewinds_a_generator_that_on_cpu_has_no_offset() -> None:
    with pytest.raises(RuntimeError, match="offset"):
        torch.Generator("cpu").get_offset()
    spec = util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = (Path(spec.origin).parent / "v1/worker/gpu_model_runner.py").read_text(encoding="utf-8")
    assert "gen.set_offset(gen.get_offset() - 4)" in source, "mended upstream: drop whole_prompt_arguments"


def test_a_cpu_engine_takes_every_prompt_whole() -> None:
    arguments = engine_arguments(ServeConfig(max_model_len=8192))
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["max_num_batched_tokens"] >= 8192

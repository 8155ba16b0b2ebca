"""vLLM's greedy tokens against transformers' on the same files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from gemma_ray.artifacts import read_json, write_json
from gemma_ray.errors import ModelError, StageError
from gemma_ray.serving.offline import generate_greedy

PROMPTS = [[2, 5, 7, 9], [2, 100, 200, 300, 400, 500], [2], list(range(10, 160))]


def by_transformers(folder: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    outputs = [model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False)[0].tolist() for prompt in prompts]
    return [output[len(prompt) :] for prompt, output in zip(prompts, outputs, strict=True)]


def test_greedy_tokens_equal_transformers_and_end_with_the_end_token(tiny_model: Path, tmp_path: Path):
    unstopped = by_transformers(tiny_model, [PROMPTS[-1]], 24)[0]
    assert len(set(unstopped)) > 4, "the prompt was chosen for a continuation that is not one token over and over"
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    end = unstopped[12]
    generation = read_json(folder / "generation_config.json")
    write_json(folder / "generation_config.json", {**generation, "eos_token_id": [1, end]})
    (folder / "tokenizer.json").unlink()  # token ids in, token ids out

    expected = by_transformers(folder, PROMPTS, 24)
    assert expected[-1][-1] == end
    assert len(expected[-1]) <= 13
    assert max(map(len, expected)) == 24
    log = tmp_path / "log" / "vllm.log"
    assert generate_greedy(folder, PROMPTS, 24, log=log) == expected
    assert "Initializing a V1 LLM engine" in log.read_text()


@pytest.mark.slow
def test_a_model_that_vllm_refuses_is_one_line_with_its_reason(tiny_model: Path, tmp_path: Path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    write_json(folder / "config.json", {**read_json(folder / "config.json"), "architectures": ["NoSuchModel"]})
    with pytest.raises(StageError, match="NoSuchModel") as failure:
        generate_greedy(folder, [[2]], 1, log=tmp_path / "vllm.log")
    assert "\n" not in str(failure.value)
    assert str(tmp_path / "vllm.log") in str(failure.value)


def test_nothing_is_started_for_a_folder_without_weights_or_an_empty_prompt(tiny_model: Path, tmp_path: Path):
    with pytest.raises(ModelError, match="no such model folder"):
        generate_greedy(tmp_path / "nowhere", [[2]], 1)
    with pytest.raises(ModelError, match="at least one token"):
        generate_greedy(tiny_model, [[2], []], 1)
    assert generate_greedy(tiny_model, [], 1) == []

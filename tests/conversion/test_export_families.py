"""An adapter of each of Gemma 4's structures, trained, merged and exported, gives transformers the logits that Tunix has with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_gemma import SHORT, rewrite_tensors, some_slow, write_uneven_gemma

from gemma_ray.conversion.config import ConvertConfig
from gemma_ray.conversion.export import export
from gemma_ray.conversion.verify import verify
from gemma_ray.data.prepare import prepare_text
from gemma_ray.training.config import LoraConfig, MeshConfig, TrainConfig
from gemma_ray.training.loop import TrainJob, train

PROMPTS = [[2, 4, 300, 301, 302, 5], [2, 270, 280, 290]]
UNREAD = [f"model.layers.{i}.self_attn.{part}.weight" for i in (2, 3) for part in ("k_proj", "v_proj", "k_norm")]


def greedy(model: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """By transformers, a forward pass a token, of files in which it misses nothing and finds nothing unexpected."""
    import torch
    from transformers import Gemma4ForCausalLM

    options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    found: Any = Gemma4ForCausalLM.from_pretrained(model, **options)
    loaded, loading = found
    assert not any(loading.values()), loading
    continuations = []
    for prompt in prompts:
        row = list(prompt)
        while len(row) < len(prompt) + new_tokens and (row == prompt or row[-1] not in (1, 5)):
            with torch.no_grad():
                row.append(int(loaded(torch.tensor([row]), use_cache=False).logits[0, -1].argmax()))
        continuations.append(row[len(prompt) :])
    return continuations


@pytest.mark.parametrize("preset", some_slow("gemma4-tiny-e2b", "gemma4-tiny-26b-a4b"))
def test_the_exported_model_is_the_one_that_was_trained(preset: str, tmp_path: Path) -> None:
    base = write_uneven_gemma(tmp_path / preset, preset, **SHORT[preset])
    shares = preset.endswith(("e2b", "e4b"))
    if shares:  # as released files have it
        rewrite_tensors(base, lambda tensors: {**tensors, **{name: np.full((2, 3), 7, np.float32) for name in UNREAD}})
    prepare_text([f"module m{i};\nendmodule\n" for i in range(80)], base, 32, tmp_path / "data")
    job: dict[str, Any] = {"model": base, "data": tmp_path / "data", "out": tmp_path}
    settings = TrainConfig(steps=2, batch_size=8, learning_rate=5e-2, warmup_steps=0, checkpoint_every=2)
    mesh, lora = MeshConfig(fsdp=8, tp=1), LoraConfig(rank=4, alpha=8)
    job |= {"dtype": "float32", "seq_len": 32, "made_from": {}}
    train(TrainJob(**job, mesh=mesh, train=settings, lora=lora), lambda report: None)

    done = export(base, tmp_path / "checkpoints", tmp_path / "exported", ConvertConfig())
    # 7 projections a layer, but no v_proj where K is V, and no k_proj either where another layer's are used
    assert done.changed == (4 * 7 - 2 * 2 if shares else 2 * 7 - 1)
    found = verify(base, tmp_path / "checkpoints", tmp_path / "exported", PROMPTS, ConvertConfig(verify_new_tokens=4), greedy)
    print(f"{preset}: {found.summary()}")
    assert found.passed, found.summary()
    assert found.max_abs_logit_diff <= 2e-4

    before, after = (load_file(next(folder.glob("*.safetensors"))) for folder in (base, tmp_path / "exported"))
    assert before.keys() == after.keys()
    projections = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    merged = {name for name in before if name.split(".")[-2] in projections and name not in UNREAD and "experts" not in name}
    assert {name for name in before if not np.array_equal(before[name], after[name])} == merged

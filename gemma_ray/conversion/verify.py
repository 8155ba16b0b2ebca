"""Proof that an exported model is the model that was trained.

Three programs read the same weights in fp32: Tunix with the checkpoint on top of the base, transformers with the exported files, and vLLM
with the exported files. Logits of the first two must agree within a tolerance on the run's own prompts and their continuations; greedy
tokens of all three must be equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemma_ray.conversion.config import ConvertConfig
from gemma_ray.errors import ModelError
from gemma_ray.models.gemma4 import read_text_config
from gemma_ray.models.loading import TensorFiles, check_complete
from gemma_ray.models.parameter_map import gemma4_rows
from gemma_ray.training.checkpoints import read_checkpoint

GreedyFn = Callable[[Path, list[list[int]], int], list[list[int]]]
"""(model folder, prompts as token ids, new tokens) → continuations as token ids, ended at an end-of-sequence token."""


@dataclass(frozen=True)
class TensorCheck:
    """One exported tensor against the base's: how far it moved, and whether every number in it is finite."""

    name: str
    max_abs_change: float
    finite: bool


@dataclass(frozen=True)
class Verification:
    """What `verify` found. Logit differences are absolute, in fp32; `scale` is the largest logit."""

    max_abs_logit_diff: float
    tolerance: float
    logit_scale: float
    positions: int
    prompts: int
    tunix_greedy_equal: int
    vllm_greedy_equal: int
    greedy_match: bool
    tensors_changed: int
    tensors_equal_to_base: int
    tensors: tuple[TensorCheck, ...]

    @property
    def passed(self) -> bool:
        return self.max_abs_logit_diff <= self.tolerance and self.greedy_match and all(t.finite for t in self.tensors)

    def summary(self) -> str:
        """One line for people."""
        return (
            f"logits within {self.max_abs_logit_diff:.1e} (tolerance {self.tolerance:.0e}) over {self.positions} positions; "
            f"greedy tokens equal in Tunix {self.tunix_greedy_equal}/{self.prompts}, in vLLM {self.vllm_greedy_equal}/{self.prompts}"
        )

    def to_json(self) -> dict[str, Any]:
        """The content of verify.json."""
        return {"passed": self.passed, **dataclasses.asdict(self)}


def verify(
    base: Path, checkpoints: Path, exported: Path, prompts: Sequence[Sequence[int]], config: ConvertConfig, vllm_greedy: GreedyFn
) -> Verification:
    """Compare an exported model with the checkpoint it came from, on prompts given as token ids.

    Runs on one host's CPU and holds the model twice in fp32. Raises CheckpointError or ModelError when either side cannot be read.
    """
    tensors = tuple(_check_tensors(base, exported))  # first: a damaged export is named here, and only confuses the others
    torch_prompts = [list(map(int, p)) for p in prompts]
    continuations, rows, torch_logits = _transformers_side(exported, torch_prompts, config.verify_new_tokens)
    tunix_logits = _tunix_logits(base, checkpoints, rows)
    difference = max(float(np.abs(a - b).max()) for a, b in zip(tunix_logits, torch_logits, strict=True))
    tunix_equal = sum(
        logits[len(prompt) - 1 : len(row) - 1].argmax(-1).tolist() == row[len(prompt) :]
        for prompt, row, logits in zip(torch_prompts, rows, tunix_logits, strict=True)
    )
    from_vllm = vllm_greedy(exported, torch_prompts, config.verify_new_tokens)
    vllm_equal = sum(a == b for a, b in zip(from_vllm, continuations, strict=True))
    return Verification(
        max_abs_logit_diff=difference,
        tolerance=config.logit_tolerance,
        logit_scale=max(float(np.abs(x).max()) for x in torch_logits),
        positions=sum(map(len, rows)),
        prompts=len(rows),
        tunix_greedy_equal=tunix_equal,
        vllm_greedy_equal=vllm_equal,
        greedy_match=tunix_equal == vllm_equal == len(rows),
        tensors_changed=sum(t.max_abs_change > 0 for t in tensors),
        tensors_equal_to_base=sum(t.max_abs_change == 0 for t in tensors),
        tensors=tensors,
    )


def _transformers_side(
    exported: Path, prompts: list[list[int]], new_tokens: int
) -> tuple[list[list[int]], list[list[int]], list[np.ndarray]]:
    """Greedy continuations, prompt + continuation rows, and the rows' logits [length, vocab] by transformers in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        exported, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    continuations, rows, logits = [], [], []
    with torch.no_grad():
        for prompt in prompts:
            output = model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False)[0].tolist()
            rows.append(output)
            continuations.append(output[len(prompt) :])
            logits.append(model(torch.tensor([output])).logits[0].numpy())
    return continuations, rows, logits


def _tunix_logits(base: Path, checkpoints: Path, rows: list[list[int]]) -> list[np.ndarray]:
    """The rows' logits [length, vocab] by Tunix in fp32: the base's weights with the checkpoint's parameters put in place."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from gemma_ray.models.axes import AXES
    from gemma_ray.training.build import build_model

    checkpoint = read_checkpoint(checkpoints)
    mesh = jax.make_mesh((1, 1, 1), AXES, devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,) * 3)
    lora = checkpoint.lora if checkpoint.mode == "lora" else None
    with mesh, jax.default_matmul_precision("highest"):
        model = build_model(base, mesh, "float32", lora)
        _put_parameters(model, checkpoint.parameters)
        forward = nnx.jit(lambda m, tokens, positions, segments: m(tokens, positions, segments))
        width = max(map(len, rows))  # one compilation: rows are padded, and a causal model does not see what follows
        positions, one_document = jnp.arange(width)[None], jnp.ones((1, width), jnp.int32)
        padded = [np.array([row + [0] * (width - len(row))], np.int32) for row in rows]
        return [
            np.asarray(forward(model, tokens, positions, one_document))[0, : len(row)] for tokens, row in zip(padded, rows, strict=True)
        ]


def _put_parameters(model: Any, parameters: dict[str, np.ndarray]) -> None:
    import jax.numpy as jnp
    from flax import nnx

    state = nnx.state(model, nnx.Param)
    for path, variable in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        if name in parameters:
            variable.set_value(jnp.asarray(parameters[name], variable.get_value().dtype))
    nnx.update(model, state)


def _check_tensors(base: Path, exported: Path) -> list[TensorCheck]:
    checks = []
    rows = gemma4_rows(read_text_config(exported))
    with TensorFiles(base) as before, TensorFiles(exported) as after:
        check_complete(after, rows)
        for name in sorted(after.file_of):
            if name not in before.file_of or before.shape(name) != after.shape(name):
                raise ModelError(f"{exported}: tensor '{name}' {list(after.shape(name))} is not one of {base}; remove it and convert again")
            old, new = before.read(name).astype(np.float32), after.read(name).astype(np.float32)
            checks.append(TensorCheck(name, float(np.abs(new - old).max()), bool(np.isfinite(new).all())))
    return checks

"""The model as the PyTorch trainer trains it: Transformers' text-only Gemma 4 with PEFT's LoRA, adapters in fp32.

Attention is PyTorch's `scaled_dot_product_attention` with a block-diagonal mask, on CPU and on GPU alike. FlashAttention's variable-length
kernels, which would need no mask, take heads of up to 256; the global layers of Gemma 4 31B have 512.

Two things differ from the JAX adapter where k_proj and v_proj are among the targets: PEFT gives each of them its own A, and Tunix has one
for both. And PEFT draws A from a range that is smaller by √6: Kaiming-uniform with a = √5, where Qwix is He-uniform.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLora
from peft import PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from gemma_ray.errors import CheckpointError, ModelError
from gemma_ray.models.gemma4 import FETCH, read_text_config
from gemma_ray.training.config import LoraConfig

ADAPTER = "adapter_model.safetensors"
ATTENTION = "sdpa"
_MULTIMODAL = {r"^model\.language_model\.": "model."}
"""Names in the official files (`Gemma4ForConditionalGeneration`) to those of the text-only model."""


def load_base(folder: Path, dtype: str, one_rank_reads: bool = False) -> Gemma4ForCausalLM:
    """The folder's text model on this host's CPU, its weights in `dtype`.

    `one_rank_reads` leaves the weights of a host's other ranks empty, for FSDP to send them: the host's memory holds the model once.
    Raises ModelError when the config is none of a dense Gemma 4, or a parameter is in no file.
    """
    text = read_text_config(folder)
    with _fsdp_loading(one_rank_reads):
        loaded: Any = Gemma4ForCausalLM.from_pretrained(
            folder,
            config=Gemma4TextConfig(**text),
            dtype=getattr(torch, dtype),
            key_mapping=_MULTIMODAL,
            attn_implementation=ATTENTION,
            output_loading_info=True,
        )
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:
        raise ModelError(f"{folder}: {len(missing)} parameters are in no file, the first: {missing[0]}; {FETCH}")
    model.config.use_cache = False
    return model


def peft_config(lora: LoraConfig) -> PeftLora:
    """The recipe's `lora` section as PEFT's."""
    return PeftLora(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,  # type: ignore[arg-type]  # it is divided by r
        lora_dropout=getattr(lora, "dropout", 0.0),
        use_rslora=getattr(lora, "rslora", False),
        target_modules=list(lora.targets),
        bias="none",
        task_type="CAUSAL_LM",
    )


def build_adapted(base: Gemma4ForCausalLM, lora: LoraConfig, seed: int) -> PeftModel:
    """The model with a fresh adapter: A from `seed`, B zero, both fp32 whatever the base is."""
    torch.manual_seed(seed)
    return get_peft_model(base, peft_config(lora))  # type: ignore[return-value]


def load_adapter(model: PeftModel, folder: Path) -> None:
    """Put a saved adapter's numbers into the model's. Raises CheckpointError when it is an adapter of another shape."""
    if any(p.is_meta for p in trained(model).values()):
        return  # this rank's numbers come from another
    try:
        outcome: Any = set_peft_model_state_dict(model, load_file(folder / ADAPTER))
    except (RuntimeError, OSError) as e:
        raise CheckpointError(f"{folder / ADAPTER}: not an adapter of this recipe's lora section ({str(e).splitlines()[0]})") from e
    absent = [name for name in outcome.missing_keys if "lora_" in name]
    if absent or outcome.unexpected_keys:
        raise CheckpointError(f"{folder / ADAPTER}: not an adapter of this recipe's lora.targets; {(absent + outcome.unexpected_keys)[0]}")


def trained(model: Any) -> dict[str, torch.nn.Parameter]:
    """The adapter's parameters by name, the same whether layers are wrapped for recomputation or not."""
    return {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters() if p.requires_grad}


@contextmanager
def _fsdp_loading(one_rank_reads: bool) -> Iterator[None]:
    """What tells Transformers to read on one rank of a host; it has no argument for it."""
    names = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(one_rank_reads)))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

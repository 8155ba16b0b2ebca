"""Useful tokens a second of trainers on the same examples, on this machine's CPU: `python benchmarks/train_throughput.py`.

    ours        `gemma_ray.training.loop.train`, examples packed into rows
    tunix       Tunix's own PeftTrainer, Gemma 4 and loss, LoRA by Qwix, on the very same packed rows (block masks keep documents apart)
    trl         TRL's SFTTrainer with PEFT as it comes: one example a row, a batch padded to its longest, gradient checkpointing
    trl-kept    the same without gradient checkpointing, as ours and Tunix's run here
    trl-padded  as it comes, every row padded to the longest allowed: the run that this project's paper reports pads so

All train rank-8 adapters on all projections of the built-in tiny Gemma 4 in fp32 with AdamW, on one device.
Lengths are drawn like those of the paper's data (mean 922 of 3,072, p99 2,553: log-normal), an eighth as long; tokens are random. Every
variant runs in processes of its own, in turn; the first steps, which compile, are left out. A useful token is one that is no padding.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROW, BATCH, EXAMPLES = 384, 8, 1600
STEPS, LEFT_OUT, ROUNDS = 20, 4, 3
TRL = {
    "trl": {},
    "trl-kept": {"gradient_checkpointing": False},
    "trl-padded": {"pad_to_multiple_of": ROW},
}  # arguments of SFTConfig other than its defaults
VARIANTS = ("ours", "tunix", *TRL)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def documents() -> list[Any]:
    """Examples of which the last third bears loss."""
    import numpy as np

    from gemma_ray.models.templates import Tokens

    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(102.3), 0.489, EXAMPLES), 16, ROW).astype(int)
    return [Tokens(random.integers(8, 1024, n).astype(np.int32), np.arange(n) >= 2 * n // 3) for n in lengths]


def write_data(folder: Path) -> None:
    """The examples as packed shards."""
    from gemma_ray.data.packing import pack
    from gemma_ray.data.records import pack_row
    from gemma_ray.data.shards import Manifest, Shard, shard_name, write_shard

    examples = documents()
    rows = pack([len(example.ids) for example in examples], ROW)
    tokens, loss = sum(len(e.ids) for e in examples), sum(int(e.loss.sum()) for e in examples)
    name = shard_name(0, 1)
    sha256 = write_shard(folder / name, [pack_row([examples[i] for i in members]) for members in rows])
    shard = Shard(name, len(rows), sha256, len(examples), tokens, loss, dict(Counter([ROW] * len(rows))))
    counts: dict[str, Any] = {key: {} for key in ("rows_dropped", "example_lengths", "schemas", "decontaminated")}
    texts: dict[str, Any] = dict.fromkeys(("tokenizer", "source", "template"), "")
    padding = 1 - tokens / (len(rows) * ROW)
    manifest = Manifest(
        EXAMPLES, EXAMPLES, tokens=tokens, loss_tokens=loss, padding_fraction=padding, seq_len=ROW, layout="packed",
        sequences=len(rows), probes=[], shards=[shard], **counts, **texts,
    )  # fmt: skip
    manifest.write(folder)


def ours(model: Path, data: Path, out: Path) -> list[tuple[float, float]]:
    """(useful tokens, seconds) of each step."""
    from gemma_ray.training.config import LoraConfig, MeshConfig, TrainConfig
    from gemma_ray.training.loop import TrainJob, train
    from gemma_ray.training.metrics import read_metrics

    settings = TrainConfig.model_validate({"steps": STEPS, "batch_size": BATCH, "checkpoint_every": 1000, "tensorboard": False})
    job = TrainJob(model, data, out, "float32", ROW, MeshConfig(), settings, LoraConfig(rank=8, alpha=8), {})
    train(job, lambda _: None)
    return [(m.tokens_per_s * m.step_s, m.step_s) for m in read_metrics(job.metrics)]


def tunix(model: Path, data: Path, out: Path) -> list[tuple[float, float]]:
    """The same by Tunix alone, as its examples show it."""
    import jax
    import jax.numpy as jnp
    import optax
    import qwix
    from flax import nnx
    from tunix.models.gemma4 import model as gemma4
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

    from gemma_ray.data.source import batches
    from gemma_ray.models.gemma4 import read_text_config, tunix_config
    from gemma_ray.models.loading import load_state
    from gemma_ray.models.parameter_map import gemma4_rows
    from gemma_ray.training.build import state_paths
    from gemma_ray.training.lora import module_pattern

    text = read_text_config(model)
    base = gemma4.Gemma4(tunix_config(text, "float32"), rngs=nnx.Rngs(params=0))
    state = nnx.state(base, nnx.Param)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaves = {path: jax.ShapeDtypeStruct(v.get_value().shape, jnp.float32, sharding=one) for path, v in state_paths(state).items()}
    values = load_state(model, gemma4_rows(text), leaves)
    for path, variable in state_paths(state).items():
        variable.set_value(values[path])
    nnx.update(base, state)
    provider = qwix.LoraProvider(module_path=module_pattern(TARGETS), rank=8, alpha=8.0)
    adapted: Any = qwix.apply_lora_to_model(base, provider, rngs=nnx.Rngs(params=0), **base.get_model_input())
    useful: list[int] = []

    def examples() -> Any:
        rows = batches(data, batch_size=BATCH, seq_len=ROW, seed=0)
        for _ in range(STEPS):
            batch = next(rows)
            segments = batch["segments"]
            useful.append(int((segments > 0).sum()))
            alike = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((ROW, ROW), bool))
            yield {
                "input_tokens": batch["tokens"],
                "input_mask": batch["loss_mask"],
                "positions": batch["positions"],
                "attention_mask": alike,
            }

    ends: list[float] = []

    class Timed(PeftTrainer):
        def _post_process_train_step(self, aux: Any) -> None:
            del aux
            assert self._buffered_train_metrics is not None
            loss: Any = self._buffered_train_metrics.losses[-1]
            jax.block_until_ready(loss)
            ends.append(time.perf_counter())

    Timed(adapted, optax.adamw(1e-4), TrainingConfig(eval_every_n_steps=1000, max_steps=STEPS)).train(examples())
    return [(tokens, end - start) for tokens, start, end in zip(useful[1:], ends, ends[1:], strict=False)]


def trl(variant: str, model: Path, data: Path, out: Path) -> list[tuple[float, float]]:
    """The same by TRL and PEFT."""
    del data
    import numpy as np
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    rows = [{"input_ids": e.ids.tolist(), "labels": np.where(e.loss, e.ids, -100).tolist()} for e in documents()]
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    ends: list[float] = []
    useful: list[int] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            del args, kwargs
            ends.append(time.perf_counter())

    class Counted(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            useful.append(int(inputs["attention_mask"].sum()))
            return super().compute_loss(model, inputs, *args, **kwargs)

    config = SFTConfig(
        output_dir=str(out), max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=1e-4, max_length=ROW, packing=False,
        completion_only_loss=True, bf16=False, use_cpu=True, report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True, dataset_kwargs={"skip_prepare_dataset": True}, **TRL[variant],
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"), pad_token="<pad>", eos_token="<eos>")
    adapter = LoraConfig(r=8, lora_alpha=8, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    trainer = Counted(
        base, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, peft_config=adapter, callbacks=[Clock()]
    )
    trainer.train()
    return [(tokens, end - start) for tokens, start, end in zip(useful[1:], ends, ends[1:], strict=False)]


def measure(variant: str, root: Path) -> float:
    """Useful tokens a second of one process, first steps left out."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--variant", variant, "--root", str(root)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.stderr[-3000:])
    steps = json.loads(ended.stdout.splitlines()[-1])[LEFT_OUT:]
    return sum(tokens for tokens, _ in steps) / sum(seconds for _, seconds in steps)


def main() -> None:
    """Run every variant in turn, some rounds, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        with tempfile.TemporaryDirectory() as out:
            work = {"ours": ours, "tunix": tunix}.get(arguments.variant, functools.partial(trl, arguments.variant))
            found = work(arguments.root / "model", arguments.root / "data", Path(out))
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _prepare(root)
        rates: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for _ in range(ROUNDS):
            for variant in VARIANTS:
                rates[variant].append(measure(variant, root))
                print(f"{variant:10} {rates[variant][-1]:8,.0f} useful tokens/s", file=sys.stderr)
    middle = {variant: statistics.median(found) for variant, found in rates.items()}
    print(f"| trainer | useful tokens/s, median of {ROUNDS} | lowest to highest | ours is |\n| --- | --- | --- | --- |")
    for variant in VARIANTS:
        low, high = min(rates[variant]), max(rates[variant])
        print(f"| {variant} | {middle[variant]:,.0f} | {low:,.0f} to {high:,.0f} | {middle['ours'] / middle[variant]:.2f} × |")


def _prepare(root: Path) -> None:
    from gemma_ray.data.verilog import raw_verilog
    from gemma_ray.models.gemma4 import PRESETS
    from gemma_ray.models.tiny import write_initial_model
    from gemma_ray.models.tokenizer import train_tokenizer

    (root / "model").mkdir()
    (root / "data").mkdir()
    train_tokenizer(raw_verilog(200, 0), PRESETS["gemma4-tiny"]["vocab_size"], root / "model")
    write_initial_model("gemma4-tiny", root / "model", 0)
    write_data(root / "data")


if __name__ == "__main__":
    main()

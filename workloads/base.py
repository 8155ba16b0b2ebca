"""The base model: a folder of the user's, or the built-in one, trained here from nothing on raw Verilog and kept in the cache.

raw modules ─► tokenizer ─► random weights ─► rows of text ─► full-parameter training on the slice ─► export ─► cache/models/NAME
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from pathlib import Path

from gemma_ray.artifacts import alone, fingerprint, whole_folder
from gemma_ray.conversion.export import export
from gemma_ray.data.prepare import prepare_text
from gemma_ray.data.verilog import raw_verilog, training_texts
from gemma_ray.errors import ModelError
from gemma_ray.models.gemma4 import PRESETS, read_text_config, text_config
from gemma_ray.models.tiny import write_initial_model
from gemma_ray.models.tokenizer import train_tokenizer
from gemma_ray.recipe import Recipe
from gemma_ray.training.config import TrainConfig
from raycluster.placement import run_task
from workloads.progress import Progress
from workloads.spmd import train_on
from workloads.stage import BUILT_IN, cluster, timed


def base_model(recipe: Recipe, progress: Progress) -> Path:
    """The folder with the base model's Hugging Face files; the built-in one is made first when the cache lacks it.

    Raises ModelError for a folder that is not there or not a Gemma 4.
    """
    source = recipe.model.source
    if not source.startswith(BUILT_IN):
        folder = Path(source).expanduser()
        if "://" in source or not folder.is_dir():
            raise ModelError(f"model.source = '{source}': no such folder; give a local folder with the model's Hugging Face files")
        read_text_config(folder)
        return folder
    preset = source.removeprefix(BUILT_IN)
    text_config(preset)
    texts = _raw_texts(recipe.model.pretrain.modules, recipe.model.pretrain.seed)
    made_from = fingerprint([PRESETS[preset], recipe.model.pretrain.model_dump(), texts])
    target = recipe.run.cache_path / "models" / f"{preset}-{made_from}"
    if target.is_dir():
        return target
    with contextlib.ExitStack() as held:
        lock = target.with_name(f".{target.name}.lock")
        try:
            held.enter_context(alone(lock))
        except BlockingIOError:
            progress.note("   another run is making this base model: waiting for it")
            held.enter_context(alone(lock, wait=True))
        if target.is_dir():
            return target
        with timed(recipe, "base model", progress):
            _make(recipe, preset, texts, target, made_from, progress)
    return target


@functools.cache
def _raw_texts(modules: int, seed: int) -> tuple[str, ...]:
    """`raw_verilog`, once a process: every stage asks for the base model, and the texts are part of its name."""
    return tuple(raw_verilog(modules, seed))


def _make(recipe: Recipe, preset: str, texts: tuple[str, ...], target: Path, made_from: str, progress: Progress) -> None:
    config = recipe.model.pretrain
    work = target.with_name(f".{target.name}.work")  # kept when interrupted: the next start continues from its checkpoint
    start, data, checkpoints = work / "start", work / "data", work / "checkpoints"
    if not start.is_dir():
        with whole_folder(start) as folder:
            # The tokenizer has seen requests, the model has not: it is a base model that can read the words and not do the task.
            words = training_texts(config.modules, config.seed)
            train_tokenizer([*texts, *words], PRESETS[preset]["vocab_size"], folder)
            write_initial_model(preset, folder, config.seed)
    if not data.is_dir():
        prepare_text(texts, start, config.seq_len, data)
    settings = TrainConfig(
        mode="full",
        steps=config.steps,
        batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        weight_decay=0.01,
        clip_norm=1.0,
        checkpoint_every=max(1, config.steps // 2),
        keep_checkpoints=1,
        tensorboard=False,
        seed=config.seed,
    )
    with cluster(recipe) as hardware:
        train_on(hardware, recipe, start, data, work, settings, config.seq_len, {"base model": made_from}, progress, name="base")
        run_task(export, start, checkpoints, target, recipe.convert, num_cpus=1)
    shutil.rmtree(work)

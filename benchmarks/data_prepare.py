"""`gemma-ray data prepare` beside `datasets.map` on the same generated rows: rows a second and peak memory.

    python benchmarks/data_prepare.py [--rows 10000 100000]

Both read JSON lines in CodeV-R1's shape, take prompt and answer apart, apply the chat format, tokenise, mark the answer's tokens, drop what
is longer than 3,072 tokens and write the result to disk, with two processes. `data prepare` is measured twice: at the same work, as far as
it can be told to leave the rest (it still checks encoding, fences and markers, drops exact duplicates and packs), and with all that it does
unless told otherwise, near duplicates and leaks of VerilogEval included. Lengths are about log-normal, as CodeV-R1's.
Memory is the sum over all processes of what each holds alone and its part of what is shared (PSS), sampled twice a second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

WORDS = ("the", "module", "has", "an", "input", "of", "and", "output", "that", "is", "when", "clock", "reset", "counts", "register", "edge")
LONGEST = 3072


def write_rows(path: Path, rows: int) -> None:
    """Generated records, no two alike."""
    rng = random.Random(0)
    with path.open("w") as out:
        for i in range(rows):
            words = max(20, int(rng.lognormvariate(6.05, 0.52)))
            said = " ".join(f"{rng.choice(WORDS)}{rng.choice(('', '', ',', '.', f' {rng.randrange(1000)}'))}" for _ in range(words))
            lines = "\n".join(
                f"  assign w{j} = r{rng.randrange(64)} {rng.choice('&|^+-')} {rng.randrange(99)};" for j in range(words // 25 + 2)
            )
            code = f"```verilog\nmodule m{i} (input clk, output y);\n{lines}\nendmodule\n```"
            record = {"prompt": f"Row {i}: {said}", "response": f"<think>{said[:200]}</think>\n<answer>\n{code}\n</answer>"}
            out.write(json.dumps(record) + "\n")


def ours(source: Path, model: Path, out: Path, **settings: Any) -> dict[str, Any]:
    """The data stage on a Ray of two workers, with these keys of the recipe's `data` section."""
    import ray

    from gemma_ray.data.config import DataConfig
    from gemma_ray.data.files import source_files
    from gemma_ray.data.prepare import prepare

    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=40, log_to_driver=False)
    began = time.perf_counter()
    manifest = prepare(DataConfig(max_seq_len=LONGEST, **settings), source_files(str(source)), model, out)
    took = time.perf_counter() - began
    ray.shutdown()
    return {"seconds": took, "kept": manifest.rows_kept, "tokens": manifest.tokens, "padding": manifest.padding_fraction}


def theirs(source: Path, model: Path, out: Path, batch_size: int) -> dict[str, Any]:
    """datasets.map with two processes, so many rows at a time."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def mapped(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        texts, spans = [], []
        for prompt, response in zip(batch["prompt"], batch["response"], strict=True):
            answer = re.search(r"<answer>(.*?)</answer>", response, re.DOTALL)
            said = answer[1].strip() if answer else ""
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": said}]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            texts.append(text)
            spans.append((text.rindex(said), len(text) - 1))
        encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        masks = [[a <= s and e <= b for s, e in offsets] for (a, b), offsets in zip(spans, encoded["offset_mapping"], strict=True)]
        return {"input_ids": encoded["input_ids"], "loss_mask": masks}

    began = time.perf_counter()
    rows: Any = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(out / "cache"))
    rows = rows.map(mapped, batched=True, batch_size=batch_size, num_proc=2, remove_columns=rows.column_names)
    rows = rows.filter(lambda batch: [len(ids) <= LONGEST for ids in batch["input_ids"]], batched=True, num_proc=2)
    rows.save_to_disk(str(out / "data"))
    took = time.perf_counter() - began
    return {"seconds": took, "kept": len(rows), "tokens": sum(map(len, rows["input_ids"])) if len(rows) <= 20_000 else None}


RUNS: dict[str, Any] = {
    "single": partial(theirs, batch_size=1),
    "batched": partial(theirs, batch_size=128),
    "same": partial(ours, verilog=False, near_duplicates=None, decontaminate=()),
    "ours": ours,
}
NAMES = {
    "single": "datasets.map, 2 processes, row by row",
    "batched": "datasets.map, 2 processes, 128 rows at a time",
    "same": "gemma-ray data prepare, 2 workers, the same work",
    "ours": "gemma-ray data prepare, 2 workers, all of its checks",
}


def measured(what: str, source: Path, model: Path, out: Path) -> dict[str, Any]:
    """One of the two in a process of its own, and the most memory that it and its children held."""
    command = [sys.executable, __file__, "--run", what, str(source), str(model), str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"})
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            most[0] = max(most[0], tree_bytes(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    printed = process.communicate()[0]
    done.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(process.returncode)
    return {**json.loads(printed.splitlines()[-1]), "peak_bytes": most[0]}


def tree_bytes(pid: int) -> int:
    """Proportional set size of a process and all below it."""
    import psutil

    total = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in processes:
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) * 1024
    return total


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="gemma-ray data prepare beside datasets.map")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        what, source, model, out = arguments.run
        sys.stdout.write(json.dumps(RUNS[what](Path(source), Path(model), Path(out))) + "\n")
        return
    from gemma_ray.data.verilog import write_dataset
    from gemma_ray.models.gemma4 import PRESETS
    from gemma_ray.models.tiny import write_initial_model
    from gemma_ray.models.tokenizer import train_tokenizer

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_dataset(folder / "verilog", examples=500, heldout_problems=1, seed=0)
        model = folder / "model"
        model.mkdir()
        train_tokenizer((folder / "verilog" / "train.jsonl").read_text().splitlines(), PRESETS["gemma4-tiny"]["vocab_size"], model)
        write_initial_model("gemma4-tiny", model, seed=0)
        sys.stdout.write("| rows | | seconds | rows/s | peak memory, MiB | kept |\n| --- | --- | --- | --- | --- | --- |\n")
        for rows in arguments.rows:
            source = folder / f"{rows}.jsonl"
            write_rows(source, rows)
            for what, name in NAMES.items():
                found = measured(what, source, model, folder / f"{what}-{rows}")
                line = f"| {rows:,} | {name} | {found['seconds']:.1f} | {rows / found['seconds']:,.0f} |"
                sys.stdout.write(f"{line} {found['peak_bytes'] / 2**20:,.0f} | {found['kept']:,} |\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()

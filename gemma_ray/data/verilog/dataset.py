"""The built-in data set: training examples in the shape of CodeV-R1's SFT set, and held-out problems in VerilogEval's layout.

FOLDER/train.jsonl     a line an example: prompt, response, family, parameters
FOLDER/heldout/        Prob001_…_prompt.txt, _ref.sv, _test.sv
FOLDER/summary.json    `DatasetSummary`
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gemma_ray.artifacts import whole_folder, write_json
from gemma_ray.data.verilog.bench import Problem, problem
from gemma_ray.data.verilog.families import FAMILIES
from gemma_ray.data.verilog.family import Family
from gemma_ray.data.verilog.golden import Params
from gemma_ray.data.verilog.icarus import check_modules, icarus_version, run_bench
from gemma_ray.data.verilog.sampling import shuffled_rounds
from gemma_ray.data.verilog.split import point_key, split
from gemma_ray.errors import DataError, StageError


@dataclass(frozen=True)
class DatasetSummary:
    """What a data set holds and what was checked of it; `summary.json` has the same keys.

    `repeated_examples` counts examples whose prompt and response both stand earlier in the file; `heldout_points` names each problem's
    point; `modules_checked` different modules were simulated against their golden models, comparing `samples_checked` outputs, and
    `benches_checked` references passed their own bench.
    """

    seed: int
    simulator: str
    examples: int
    repeated_examples: int
    heldout_problems: int
    examples_by_family: dict[str, int]
    heldout_by_family: dict[str, int]
    heldout_points: dict[str, str]
    modules_checked: int
    samples_checked: int
    benches_checked: int


def write_dataset(folder: Path, *, examples: int, heldout_problems: int, seed: int) -> DatasetSummary:
    """Write a data set; the same arguments give the same bytes.

    Every module written is first simulated against its golden model, and every held-out reference on its own bench.

    Raises DataError for more held-out problems than there are held-out points, ToolError without Icarus Verilog, StageError (naming family
    and parameters) when a check fails. Nothing is written then.
    """
    if examples < 1 or heldout_problems < 1:
        raise DataError(
            f"examples = {examples}, heldout_problems = {heldout_problems}: the built-in Verilog data needs at least one of each"
        )
    simulator = icarus_version()
    chosen = training_examples(examples, seed)
    problems = heldout(heldout_problems, seed)
    points = {point_key(family, p): (family, p) for family, p, _ in chosen}
    points |= {point_key(FAMILIES[made.family], made.parameters): (FAMILIES[made.family], made.parameters) for made in problems}
    samples = check_modules(list(points.values()))
    check_benches(problems)
    records = [record(family, p, phrasing) for family, p, phrasing in chosen]
    summary = DatasetSummary(
        seed=seed,
        simulator=f"Icarus Verilog {simulator}",
        examples=len(records),
        repeated_examples=len(records) - len({(made["prompt"], made["response"]) for made in records}),
        heldout_problems=len(problems),
        examples_by_family=dict(sorted(Counter(made["family"] for made in records).items())),
        heldout_by_family=dict(sorted(Counter(made.family for made in problems).items())),
        heldout_points={made.name: point_key(FAMILIES[made.family], made.parameters) for made in problems},
        modules_checked=len(points),
        samples_checked=samples,
        benches_checked=len(problems),
    )
    with whole_folder(folder) as target:
        lines = "".join(json.dumps(made) + "\n" for made in records)
        (target / "train.jsonl").write_text(lines, encoding="utf-8")
        (target / "heldout").mkdir()
        for made in problems:
            for name, text in made.files.items():
                (target / "heldout" / name).write_text(text, encoding="utf-8")
        write_json(target / "summary.json", asdict(summary))
    return summary


def training_examples(count: int, seed: int) -> list[tuple[Family, Params, int]]:
    """Training points with the number of a phrasing, spread over all families; a pair comes back once all of its family were drawn."""
    pools = [[(family, p, i) for p in split(family).training for i in range(len(family.requests))] for family in FAMILIES.values()]
    return shuffled_rounds(pools, count, random.Random(f"train:{seed}"))


def heldout(count: int, seed: int) -> list[Problem]:
    """Held-out problems, spread over all families and ordered by family. Raises DataError when there are not so many."""
    rng = random.Random(f"heldout:{seed}")
    waiting = {family.name: rng.sample(points, len(points)) for family in FAMILIES.values() if (points := split(family).heldout)}
    available = sum(map(len, waiting.values()))
    if count > available:
        raise DataError(
            f"heldout_problems = {count}: only {available} combinations of parameters are held out; ask for at most {available}"
        )
    taken: list[tuple[Family, Params]] = []
    while len(taken) < count:
        names = [name for name, points in waiting.items() if points]
        taken += [(FAMILIES[name], waiting[name].pop()) for name in rng.sample(names, len(names))[: count - len(taken)]]
    taken.sort(key=lambda one: list(FAMILIES).index(one[0].name))
    return [problem(number, family, p, rng.randrange(len(family.requests))) for number, (family, p) in enumerate(taken, 1)]


def training_texts(count: int, seed: int) -> list[str]:
    """Requests and answers of training points as plain text: what a tokenizer for this data is trained on."""
    records = [record(*example) for example in training_examples(count, seed)]
    return [f"{r['prompt']}\n{r['response']}" for r in records]


def record(family: Family, p: Params, phrasing: int) -> dict[str, Any]:
    """An example with CodeV-R1's keys `prompt` and `response` (arXiv 2505.24183), and the point it was made from."""
    response = f"<think>\n{family.explanation(p)}\n</think>\n<answer>\n```verilog\n{family.module(p)}\n```\n</answer>"
    return {"prompt": family.prompt(p, phrasing), "response": response, "family": family.name, "parameters": dict(p)}


def check_benches(problems: Sequence[Problem]) -> None:
    """Run every problem's answer on its bench. Raises StageError naming the problem when a bench does not pass its own reference."""

    def check(made: Problem) -> None:
        warnings, log = run_bench(made.answer, made.reference, made.bench)
        if warnings or "Mismatches: 0 in" not in log or "TIMEOUT" in log:
            raise StageError(f"{made.name} ({made.family} {dict(made.parameters)}): its reference fails its own bench: {warnings or log}")

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(check, problems))

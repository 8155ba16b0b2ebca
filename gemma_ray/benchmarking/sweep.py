"""The sweep: contexts × rates, one cell after another, each written as soon as it is measured.

Before the first cell the endpoint is asked what it serves and how long a sequence may be, and each context sends one request that is not
counted, the longest first: what cannot work fails in seconds, and the server has compiled its shapes before anything is timed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from gemma_ray.artifacts import fingerprint, read_json, write_json
from gemma_ray.benchmarking.config import BenchConfig
from gemma_ray.benchmarking.endpoint import Endpoint
from gemma_ray.benchmarking.load import completion_body, poisson_arrivals, run_load
from gemma_ray.benchmarking.metrics import Cell, Summary, cell_name, measure
from gemma_ray.errors import InputError, StageError

Progress = Callable[[int, int, str], None]
"""Called with (done, total, what)."""


def benchmark(
    config: BenchConfig,
    out: Path,
    *,
    url: str,
    model: str | None,
    token_ids: Sequence[int],
    api_key: str | None = None,
    made_from: Any = None,
    progress: Progress | None = None,
) -> list[Cell]:
    """Measure every context × rate against an OpenAI-compatible endpoint and write `out/<context>_<qps>.json`, a file a cell.

    model       asked of the endpoint; None for the only one it serves
    token_ids   prompts are drawn from these: exactly `context` ids each, never the same twice, so that prefix caching does not help
    made_from   what the endpoint serves, where the caller knows (weights, engine settings); else its URL and model's name stand for it
    progress    called with (done, total, what), after each answer

    A cell that is already there, measured in the same way on the same thing with at least one answer, is kept. Cells measured in another
    way are removed once the endpoint has proved to work, for a folder that mixes two sweeps cannot be read.

    Raises InputError when the endpoint cannot be reached, does not serve `model`, or refuses prompts of that length (naming
    `bench.contexts`), and StageError at the end when every request of a cell failed; the cell is written all the same.
    """
    ids = np.unique(np.asarray(token_ids, np.int64))
    if not ids.size:
        raise InputError("token_ids is empty: give the ids of ordinary words to draw prompts from")
    endpoint = Endpoint.parse(url, model, api_key)
    return asyncio.run(_sweep(config, out, endpoint, ids, made_from, progress or (lambda done, total, what: None)))


async def _sweep(config: BenchConfig, out: Path, endpoint: Endpoint, ids: np.ndarray, made_from: Any, progress: Progress) -> list[Cell]:
    async with endpoint.client() as client:
        model, limit = await endpoint.resolve(client)
        how = config.model_dump(exclude={"contexts", "qps"})
        where = {"made_from": made_from} if made_from is not None else {"url": endpoint.base}
        sweep = _Sweep(
            config=config,
            out=out,
            client=client,
            endpoint=endpoint,
            model=model,
            ids=ids,
            made_from=fingerprint({**how, **where, "model": model, "token_ids": fingerprint(ids.tolist())}),
            progress=progress,
        )
        return await sweep.run(limit)


@dataclass(frozen=True)
class _Sweep:
    config: BenchConfig
    out: Path
    client: aiohttp.ClientSession
    endpoint: Endpoint
    model: str
    ids: np.ndarray
    made_from: str
    """Fingerprint of what every cell depends on; not the contexts and rates, so that a sweep can be widened."""
    progress: Progress

    async def run(self, limit: int | None) -> list[Cell]:
        wanted = [(context, qps) for context in self.config.contexts for qps in self.config.qps]
        cells = {key: cell for key in wanted if (cell := self.finished_cell(*key))}
        for key, cell in cells.items():
            self.progress(cell.requests, cell.requests, f"{_title(*key)} (kept)")
        missing = [key for key in wanted if key not in cells]
        contexts = sorted({context for context, _ in missing}, reverse=True)
        if contexts:
            self.check_length(contexts[0], limit)
        for context in contexts:
            await self.warm_up(context)
        self.remove_other_sweeps()
        for key in missing:
            cells[key] = await self.run_cell(*key)
        _refuse_dead([cells[key] for key in wanted])
        return [cells[key] for key in wanted]

    def check_length(self, context: int, limit: int | None) -> None:
        if limit and context + self.config.output_tokens > limit:
            raise InputError(
                f"bench.contexts: {context} prompt tokens + bench.output_tokens {self.config.output_tokens} exceed the endpoint's longest "
                f"sequence, {limit}. Lower one, or raise serve.max_model_len"
            )

    async def warm_up(self, context: int) -> None:
        """One request that is not counted. A refusal is the user's to mend; any other failure is left for the cells to record."""
        what = f"{context} tokens, warm-up"
        self.progress(0, 1, what)
        bodies, _ = self.bodies(context, 1)
        [record] = await run_load(self.client, self.endpoint.completions, bodies, [0.0], self.config.timeout_s)
        if record.status in (400, 413, 422):
            raise InputError(f"bench.contexts: the endpoint refuses a prompt of {context} tokens: {record.error}")
        if record.status in (401, 403, 404, 405):
            raise InputError(f"{self.endpoint.completions}: {record.error}")
        self.progress(1, 1, what)

    async def run_cell(self, context: int, qps: float) -> Cell:
        count = self.config.requests_at(qps)
        # Bodies are made before the clock starts: encoding a long prompt in the loop would delay the next arrival.
        bodies, prompt_seed = self.bodies(context, count)
        arrival_seed = [self.config.seed, context, 0 if math.isinf(qps) else round(qps * 1e6)]
        arrivals = poisson_arrivals(count, qps, np.random.default_rng(arrival_seed))
        answers = 0

        def answered() -> None:
            nonlocal answers
            answers += 1
            self.progress(answers, count, _title(context, qps))

        records = await run_load(self.client, self.endpoint.completions, bodies, arrivals, self.config.timeout_s, answered)
        cell = measure(context, qps, self.endpoint.base, self.model, self.config.output_tokens, records)
        # The prompt seed is text: it is wider than the integers that every JSON reader keeps exactly.
        extra = {"prompt_seed": str(prompt_seed), "made_from": self.made_from}
        write_json(self.path(context, qps), {**cell.to_json(), **extra})
        return cell

    def bodies(self, context: int, count: int) -> tuple[list[bytes], int]:
        """Requests with distinct prompts, and the seed of the prompts."""
        prompts, seed = random_prompts(self.ids, context, count)
        return [completion_body(self.model, prompt, self.config.output_tokens) for prompt in prompts], seed

    def finished_cell(self, context: int, qps: float) -> Cell | None:
        """The cell on disk when it was made the same way and had an answer; None when it has to be measured (again)."""
        path = self.path(context, qps)
        cell = _whole_cell(path, context, qps) if _cell_file(path).get("made_from") == self.made_from else None
        return cell if cell and cell.completed else None

    def remove_other_sweeps(self) -> None:
        """Remove cells that a sweep with another fingerprint left; a file that no sweep wrote stays."""
        for path in self.out.glob("*.json"):
            if _cell_file(path).get("made_from", self.made_from) != self.made_from:
                path.unlink()

    def path(self, context: int, qps: float) -> Path:
        return self.out / f"{cell_name(context, qps)}.json"


def read_cells(folder: Path) -> list[Cell]:
    """The cells in a folder, by context and rate. Raises InputError for a damaged one."""
    return sorted(map(_read_cell, folder.glob("*.json")), key=lambda cell: (cell.context, cell.qps))


def whole_benchmark(folder: Path, config: BenchConfig) -> bool:
    """Whether `folder` holds a readable cell for every context × rate of `config`."""
    wanted = [(context, qps) for context in config.contexts for qps in config.qps]
    return all(_whole_cell(folder / f"{cell_name(*key)}.json", *key) for key in wanted)


def _whole_cell(path: Path, context: int, qps: float) -> Cell | None:
    """The cell in a file; None when it is missing, damaged, or another's: rates that differ little share a file name."""
    try:
        cell = _read_cell(path)
    except InputError:
        return None
    return cell if (cell.context, cell.qps) == (context, qps) else None


def _read_cell(path: Path) -> Cell:
    try:
        return Cell.from_json(read_json(path))
    except (OSError, ValueError, RecursionError) as e:
        raise InputError(f"{path} is damaged; remove it and run the benchmark again") from e


def table(cells: Sequence[Cell]) -> str:
    """The cells as lines of text; times in ms. A star marks a percentile with too few samples."""
    heads = ["context", "requests/s", "completed", "output tok/s"]
    heads += [f"{metric} {p}" for metric in ("TTFT", "TPOT") for p in ("p50", "p90", "p99")] + ["E2E p50"]
    rows = [heads]
    for cell in cells:
        latencies = [_shown(summary, p) for summary in (cell.ttft_ms, cell.tpot_ms) for p in ("p50", "p90", "p99")]
        first = [str(cell.context), f"{cell.qps:g}", f"{cell.completed}/{cell.requests}", f"{cell.output_tokens_per_s:.1f}"]
        rows.append([*first, *latencies, _shown(cell.e2e_ms, "p50")])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    if any("*" in line for line in lines):
        lines.append("* too few samples for that percentile: p99 wants 100 requests a cell (bench.requests, or bench.duration_s)")
    return "\n".join(lines)


def _shown(summary: Summary, percentile: str) -> str:
    value: float | None = getattr(summary, percentile)
    return "-" if value is None else f"{value:.1f}{'*' if percentile in summary.too_few else ''}"


def random_prompts(ids: np.ndarray, context: int, count: int) -> tuple[list[list[int]], int]:
    """`count` distinct prompts of `context` token ids, and the seed that made them.

    The seed is fresh each time, and recorded. With the recipe's own, a second sweep against a server that is still up would send the
    prompts of the first one and measure its prefix cache. Raises InputError when there are not enough ids to be distinct.
    """
    if context * math.log(ids.size) < math.log(2 * count):
        raise InputError(
            f"bench.contexts: {ids.size} token ids do not make {count} distinct prompts of {context} tokens; give a longer one"
        )
    seed = int(np.random.SeedSequence().generate_state(2, np.uint64)[0])
    rng = np.random.default_rng(seed)
    prompts: dict[tuple[int, ...], None] = {}
    while len(prompts) < count:
        prompts[tuple(rng.choice(ids, context).tolist())] = None
    return [list(prompt) for prompt in prompts], seed


def _cell_file(path: Path) -> dict[str, Any]:
    """A cell's file, empty when it is not there or not whole."""
    try:
        raw = read_json(path)
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _refuse_dead(cells: list[Cell]) -> None:
    dead = [cell for cell in cells if not cell.completed]
    if dead:
        first = _title(dead[0].context, dead[0].qps)
        reason = next(iter(dead[0].errors), "no answer")
        raise StageError(f"every request failed in {len(dead)} of {len(cells)} cells, first in {first}: {reason}")


def _title(context: int, qps: float) -> str:
    return f"{context} tokens, " + ("all at once" if math.isinf(qps) else f"{qps:g} requests/s")

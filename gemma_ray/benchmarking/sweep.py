"""The sweep: contexts × rates, one cell after another, each written as soon as it is measured.

Before the first cell the endpoint is asked what it serves and how long a sequence may be, and each context sends one request that is not
counted, the longest first: what cannot work fails in seconds, and the server has compiled its shapes before anything is timed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import numpy as np

from gemma_ray.artifacts import fingerprint, read_json, write_json
from gemma_ray.benchmarking.config import BenchConfig
from gemma_ray.benchmarking.endpoint import Endpoint
from gemma_ray.benchmarking.load import completion_body, poisson_arrivals, run_load
from gemma_ray.benchmarking.metrics import Cell, cell_name, measure
from gemma_ray.errors import InputError, StageError

Progress = Callable[[str], None]


def benchmark(
    config: BenchConfig,
    out: Path,
    *,
    url: str,
    model: str,
    token_ids: Sequence[int],
    api_key: str | None = None,
    progress: Progress | None = None,
) -> list[Cell]:
    """Measure every context × rate against an OpenAI-compatible endpoint and write `out/<context>_<qps>.json`, a file a cell.

    Each prompt is `context` ids drawn at random from `token_ids` and never sent twice, so that prefix caching does not help. A cell that is
    already there, measured the same way on the same endpoint and model with at least one answer, is kept. `progress` gets one line a step.

    Raises InputError when the endpoint cannot be reached, does not serve `model`, or refuses prompts of that length (naming
    `bench.contexts`), and StageError at the end when every request of a cell failed; the cell is written all the same.
    """
    ids = np.unique(np.asarray(token_ids, np.int64))
    if not ids.size:
        raise InputError("token_ids is empty: give the ids of ordinary words to draw prompts from")
    sweep = _Sweep(config, out, Endpoint.parse(url, model, api_key), ids, progress or (lambda line: None))
    return asyncio.run(sweep.run())


class _Sweep:
    def __init__(self, config: BenchConfig, out: Path, endpoint: Endpoint, ids: np.ndarray, say: Progress):
        self.config, self.out, self.endpoint, self.ids, self.say = config, out, endpoint, ids, say

    async def run(self) -> list[Cell]:
        wanted = [(context, qps) for context in self.config.contexts for qps in self.config.qps]
        cells: dict[tuple[int, float], Cell] = {}
        for context, qps in wanted:
            if kept := self.finished_cell(context, qps):
                cells[context, qps] = kept
                self.say(f"{_title(context, qps)}: kept, measured before")
        missing = [key for key in wanted if key not in cells]
        if missing:
            async with self.endpoint.client() as client:
                contexts = sorted({context for context, _ in missing}, reverse=True)
                self.check_lengths(contexts[0], await self.endpoint.longest_sequence(client))
                for context in contexts:
                    await self.warm_up(client, context)
                for context, qps in missing:
                    cells[context, qps] = await self.run_cell(client, context, qps)
                    self.say(_outcome(cells[context, qps]))
        _refuse_dead([cells[key] for key in wanted])
        return [cells[key] for key in wanted]

    def check_lengths(self, context: int, limit: int | None) -> None:
        if limit and context + self.config.output_tokens > limit:
            raise InputError(
                f"bench.contexts: {context} prompt tokens + bench.output_tokens {self.config.output_tokens} exceed the endpoint's longest "
                f"sequence, {limit}. Lower one, or raise serve.max_model_len"
            )

    async def warm_up(self, client: httpx.AsyncClient, context: int) -> None:
        """One request that is not counted. A refusal is the user's to mend; any other failure is left for the cells to record."""
        self.say(f"{context} tokens: warm-up")
        bodies, _ = self.bodies(context, 1)
        [record] = await run_load(client, self.endpoint.completions, bodies, [0.0], self.config.timeout_s)
        if record.status in (400, 413, 422):
            raise InputError(f"bench.contexts: the endpoint refuses a prompt of {context} tokens: {record.error}")
        if record.status in (401, 403, 404, 405):
            raise InputError(f"{self.endpoint.completions}: {record.error}")

    async def run_cell(self, client: httpx.AsyncClient, context: int, qps: float) -> Cell:
        count = self.config.requests_at(qps)
        # Bodies are made before the clock starts: encoding a long prompt in the loop would delay the next arrival.
        bodies, prompt_seed = self.bodies(context, count)
        arrival_seed = [self.config.seed, context, 0 if math.isinf(qps) else round(qps * 1e6)]
        arrivals = poisson_arrivals(count, qps, np.random.default_rng(arrival_seed))
        records = await run_load(client, self.endpoint.completions, bodies, arrivals, self.config.timeout_s)
        cell = measure(context, qps, self.endpoint.base, self.endpoint.model, self.config.output_tokens, records)
        # The prompt seed is text: it is wider than the integers that every JSON reader keeps exactly.
        extra = {"prompt_seed": str(prompt_seed), "made_from": self.made_from(context, qps)}
        write_json(self.path(context, qps), {**cell.to_json(), **extra})
        return cell

    def bodies(self, context: int, count: int) -> tuple[list[bytes], int]:
        """Requests with distinct prompts, and the seed of the prompts."""
        prompts, seed = random_prompts(self.ids, context, count)
        return [completion_body(self.endpoint.model, prompt, self.config.output_tokens) for prompt in prompts], seed

    def finished_cell(self, context: int, qps: float) -> Cell | None:
        """The cell on disk when it was made the same way and had an answer; None when it has to be measured (again)."""
        try:
            raw = read_json(self.path(context, qps))
            cell = Cell.from_json(raw) if raw["made_from"] == self.made_from(context, qps) else None
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return cell if cell and cell.completed else None

    def made_from(self, context: int, qps: float) -> str:
        """Fingerprint of what a cell depends on: not the other cells, so that a sweep can be widened."""
        how = self.config.model_dump(exclude={"contexts", "qps"})
        where = {"url": self.endpoint.base, "model": self.endpoint.model, "token_ids": fingerprint(self.ids.tolist())}
        return fingerprint({**how, **where, "context": context, "qps": qps})

    def path(self, context: int, qps: float) -> Path:
        return self.out / f"{cell_name(context, qps)}.json"


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


def _refuse_dead(cells: list[Cell]) -> None:
    dead = [cell for cell in cells if not cell.completed]
    if dead:
        first = _title(dead[0].context, dead[0].qps)
        reason = next(iter(dead[0].errors), "no answer")
        raise StageError(f"every request failed in {len(dead)} of {len(cells)} cells, first in {first}: {reason}")


def _title(context: int, qps: float) -> str:
    return f"{context} tokens, " + ("all at once" if math.isinf(qps) else f"{qps:g} requests/s")


def _outcome(cell: Cell) -> str:
    line = f"{_title(cell.context, cell.qps)}: {cell.completed}/{cell.requests} completed"
    if cell.ttft_ms.p50 is None:
        return f"{line}; {next(iter(cell.errors), '')}"
    tpot = f", TPOT {cell.tpot_ms.p50:.1f} ms" if cell.tpot_ms.p50 is not None else ""
    return f"{line}, {cell.output_tokens_per_s:.1f} output tokens/s, median TTFT {cell.ttft_ms.p50:.0f} ms{tpot}"

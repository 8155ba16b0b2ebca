"""Draw n answers a problem from an OpenAI-compatible endpoint into a samples file.

One request a problem asks for all n answers, so that the endpoint reads the prompt once; `eval.concurrency` requests are in flight. The
seed of a problem depends on the recipe's seed and the problem's name only: which problems are drawn, and in what order, changes nothing. An
endpoint that returns fewer answers than asked is asked for the rest, with the seed moved on by as many (vLLM gives the i-th answer the seed
+ i).

A request that the endpoint refuses, as when the prompt does not fit its context, leaves n samples without a program: the model cannot solve
that problem as it is served, and the summary says why. An answer that is no chat message counts as refused. When everything is refused
nothing was measured, and that is an error.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gemma_ray.artifacts import write_text
from gemma_ray.errors import InputError, StageError
from gemma_ray.evaluation.benchmarks import Problem
from gemma_ray.evaluation.config import EvalConfig
from gemma_ray.evaluation.endpoint import Endpoint, RefusedError
from gemma_ray.evaluation.extraction import extract_code
from gemma_ray.evaluation.samples import REFUSED, Sample, begin, complete_problems, dump

Progress = Callable[[int, int, str], None]


def draw_samples(
    problems: Sequence[Problem],
    config: EvalConfig,
    path: Path,
    *,
    url: str,
    model: str | None,
    made_from: Any = None,
    progress: Progress | None = None,
    pause_s: float = 0.5,
) -> tuple[list[Sample], str]:
    """Draw what `path` lacks, write it, and return all samples in the problems' order with the model's name.

    `made_from` is anything that changes when the model behind the name does. Raises InputError for a wrong model, URL or key, StageError
    when the endpoint does not answer (what was drawn stays, and the next call goes on from there) or refuses every request.
    """
    return asyncio.run(_draw(problems, config, path, url, model, made_from, progress, pause_s))


async def _draw(
    problems: Sequence[Problem],
    config: EvalConfig,
    path: Path,
    url: str,
    model: str | None,
    made_from: Any,
    progress: Progress | None,
    pause_s: float,
) -> tuple[list[Sample], str]:
    endpoint = Endpoint(
        url,
        retries=config.retries,
        timeout_s=config.request_timeout_s,
        connections=config.concurrency,
        api_key=_api_key(config),
        pause_s=pause_s,
    )
    async with endpoint:
        name = await endpoint.choose_model(model)
        drawn_with = {key: getattr(config, key) for key in ("n", "temperature", "top_p", "max_tokens", "system_prompt", "seed")}
        # Nothing is known of a model behind a foreign URL but the URL.
        kept = begin(path, {"model": name, "made_from": made_from if made_from is not None else endpoint.url, **drawn_with})
        drawn = complete_problems(kept, config.n, {p.task_id: p.prompt for p in problems})
        await _draw_missing([p for p in problems if p.task_id not in drawn], drawn, len(problems), endpoint, name, config, path, progress)
    samples = [sample for problem in problems for sample in sorted(drawn[problem.task_id], key=lambda s: s.sample)]
    write_text(path, dump(samples))
    if all(sample.finish_reason == REFUSED for sample in samples):
        raise StageError(f"{endpoint.url} refused every request, the first with {samples[0].error}")
    return samples, name


async def _draw_missing(
    missing: Sequence[Problem],
    drawn: dict[str, list[Sample]],
    total: int,
    endpoint: Endpoint,
    model: str,
    config: EvalConfig,
    path: Path,
    progress: Progress | None,
) -> None:
    """Fill `drawn`, appending each problem's samples to `path` as they come; the first fatal error ends the requests in flight."""
    in_flight = asyncio.Semaphore(config.concurrency)

    async def one(problem: Problem) -> tuple[str, list[Sample]]:
        async with in_flight:
            return problem.task_id, await _draw_problem(endpoint, model, config, problem)

    tasks = [asyncio.create_task(one(problem)) for problem in missing]
    try:
        if progress:
            progress(len(drawn), total, "problems sampled")
        with path.open("a", encoding="utf-8") as file:
            for next_done in asyncio.as_completed(tasks):
                task_id, samples = await next_done
                file.write(dump(samples))
                file.flush()
                drawn[task_id] = samples
                if progress:
                    progress(len(drawn), total, "problems sampled")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _draw_problem(endpoint: Endpoint, model: str, config: EvalConfig, problem: Problem) -> list[Sample]:
    messages = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    messages.append({"role": "user", "content": problem.prompt})
    body = {
        "model": model,
        "messages": messages,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "max_tokens": config.max_tokens,
    }
    seed = problem_seed(config.seed, problem.task_id)
    samples: list[Sample] = []
    try:
        while len(samples) < config.n:
            choices = await endpoint.chat({**body, "n": config.n - len(samples), "seed": seed + len(samples)})
            samples += [_sample(problem, len(samples) + i, choice) for i, choice in enumerate(choices[: config.n - len(samples)])]
    except RefusedError as e:
        return [Sample(problem.task_id, i, None, None, problem.prompt, REFUSED, str(e)) for i in range(config.n)]
    return samples


def _sample(problem: Problem, number: int, choice: Any) -> Sample:
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict) or not isinstance(message.get("content"), str | None):
        return Sample(problem.task_id, number, None, None, problem.prompt, REFUSED, f"no chat message with text: {str(choice)[:200]}")
    completion = message.get("content") or ""
    reason = choice.get("finish_reason")
    return Sample(problem.task_id, number, completion, extract_code(completion), problem.prompt, str(reason) if reason else None)


def problem_seed(seed: int, task_id: str) -> int:
    """A 31-bit seed for one problem's request."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{task_id}".encode()).digest()[:4], "big") >> 1


def _api_key(config: EvalConfig) -> str | None:
    if config.api_key_env is None:
        return None
    if not os.environ.get(config.api_key_env):
        raise InputError(f"eval.api_key_env = '{config.api_key_env}': that environment variable is not set")
    return os.environ[config.api_key_env]

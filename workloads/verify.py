"""`gemma-ray verify`: RUN/model against the trained checkpoint, by a Ray task: Tunix, transformers and vLLM on the run's own prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gemma_ray.artifacts import read_json, write_json
from gemma_ray.conversion.config import ConvertConfig
from gemma_ray.data.show import loss_free_prefixes
from gemma_ray.errors import ModelError, RecipeError, StageError
from gemma_ray.models.fingerprint import model_fingerprint
from gemma_ray.recipe import Recipe
from raycluster.placement import run_task
from workloads.base import base_model
from workloads.command import main
from workloads.progress import Progress
from workloads.stage import cluster, once, run_paths


def run(recipe: Recipe, progress: Progress) -> dict[str, Any]:
    """Write RUN/verify.json and return it. Raises StageError when the exported model is not the trained one."""
    paths = run_paths(recipe)
    if recipe.train.engine == "torch":
        raise RecipeError("train.engine = torch: verify compares with Tunix, which does not read PEFT's adapter; go on without it")
    if not paths.model.is_dir():
        raise ModelError(f"{paths.model}: no exported model; run `gemma-ray convert` first")
    base = base_model(recipe, progress)
    settings = recipe.convert.model_dump(mode="json", exclude={"format", "max_shard_bytes"})

    def work() -> None:
        prompts = loss_free_prefixes(paths.data, recipe.convert.verify_prompts)
        log = (paths.root / "logs" / "verify-vllm.log").absolute()
        with cluster(recipe):
            write_json(
                paths.verify,
                run_task(
                    verify_task,
                    base.absolute(),
                    paths.checkpoints.absolute(),
                    paths.model.absolute(),
                    prompts,
                    recipe.convert,
                    log,
                    num_cpus=1,
                    env={"JAX_PLATFORMS": "cpu"},
                ),
            )

    once(recipe, "verify", [model_fingerprint(paths.model), model_fingerprint(base), settings], paths.verify, work, progress)
    result = read_json(paths.verify)
    progress.note(f"   {result['summary']}")
    if not result["passed"]:
        raise StageError(f"{paths.model} is not the trained model: {result['summary']}; details in {paths.verify}")
    return result


def verify_task(
    base: Path, checkpoints: Path, exported: Path, prompts: list[list[int]], config: ConvertConfig, log: Path
) -> dict[str, Any]:
    """What the Ray task runs; on the CPU, whatever the host has."""
    from gemma_ray.conversion.verify import verify
    from gemma_ray.serving.offline import generate_greedy

    def vllm_greedy(model: Path, rows: list[list[int]], new_tokens: int) -> list[list[int]]:
        return generate_greedy(model, rows, new_tokens, dtype="float32", log=log)

    found = verify(base, checkpoints, exported, prompts, config, vllm_greedy)
    return {"summary": found.summary(), **found.to_json()}


if __name__ == "__main__":
    main(run)

"""The sections that say where the results come from and what they cost: stages, cost, artifacts, versions, recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gemma_ray.artifacts import file_sha256
from gemma_ray.reporting.blocks import NOT_RUN, Block, Details, Note, Section, Table, missing, run_columns
from gemma_ray.reporting.sources import Run
from gemma_ray.reporting.units import count, duration, size, usd
from gemma_ray.reporting.views import BenchCell

HASHED_BYTES = 16 << 20
"""Larger files are listed without a checksum: hashing tens of gigabytes of weights is not the report's work."""


def stages_section(runs: Sequence[Run]) -> Section:
    """How long each stage took."""
    if not any(run.timings for run in runs):
        return Section("stages", "Stages", [missing("Timings")], narrow=True)
    names = list(dict.fromkeys(name for run in runs if run.timings for name in run.timings.stages))
    rows = [
        [name, *(NOT_RUN if not run.timings or name not in run.timings.stages else duration(run.timings.stages[name]) for run in runs)]
        for name in names
    ]
    rows.append(["total", *(duration(run.timings.total_s) if run.timings else NOT_RUN for run in runs)])
    return Section("stages", "Stages", [Table(["", *run_columns(runs)], rows)], narrow=len(runs) < 3)


def cost_section(runs: Sequence[Run]) -> Section:
    """Money, where the recipe has a price: price × time, with both beside it."""
    blocks: list[Block] = []
    for run in runs:
        name = f"{run_columns(runs)[run.index]}: " if len(runs) > 1 else ""
        price = run.recipe.usd_per_hour if run.recipe else None
        if price is None:
            blocks.append(Note(f"{name}no price in the recipe (cost.usd_per_hour)."))
            continue
        rows = _cost_rows(run, price)
        if not rows:
            blocks.append(Note(f"{name}a price of {usd(price)} an hour, and nothing timed."))
            continue
        source = run.recipe.get("cost", "source") if run.recipe else None
        caption = f"{name}{usd(price)} an hour ({source or 'no source given: cost.source'})"
        blocks.append(Table(["", "from", "USD"], rows, caption, text=(1,)))
        if run.emulated:
            blocks.append(
                Note(
                    f"{name}the price is multiplied by this machine's times on an emulated slice: not what the accelerator would cost.",
                    "warn",
                )
            )
    return Section("cost", "Cost", blocks)


def _cost_rows(run: Run, price: float) -> list[list[str]]:
    rows = []
    if run.timings:
        timed = {**run.timings.stages, **({"total": run.timings.total_s} if run.timings.total_s is not None else {})}
        rows += [[name, f"{usd(price)}/h × {seconds:,.1f} s", usd(price * seconds / 3600)] for name, seconds in timed.items()]
    steps = [s for s in run.metrics or () if s.tokens_per_s is not None and s.step_s is not None]
    tokens, seconds = sum((s.tokens_per_s or 0) * (s.step_s or 0) for s in steps), sum(s.step_s or 0 for s in steps)
    if tokens:
        inputs = f"{usd(price)}/h × {seconds:,.1f} s of steps / {tokens:,.0f} tokens"
        rows.append(["training, a million tokens", inputs, usd(price * seconds / 3600 / tokens * 1e6)])
    for context in sorted({cell.context for cell in run.bench or ()}):
        best = max((c for c in run.bench or () if c.context == context), key=lambda c: c.output_tokens_per_s)
        if best.output_tokens_per_s:
            rows.append(_serving_row(best, price))
    return rows


def _serving_row(cell: BenchCell, price: float) -> list[str]:
    rate = cell.rate if cell.rate == "all at once" else f"{cell.rate} requests/s"
    inputs = f"{usd(price)}/h / {cell.output_tokens_per_s:,.1f} output tokens/s (best, {rate})"
    label = f"serving, a million output tokens, {count(cell.context)}-token prompts"
    return [label, inputs, usd(price / 3600 / cell.output_tokens_per_s * 1e6)]


def artifacts_section(runs: Sequence[Run], out: Path) -> Section:
    """The files of each run; deeper folders are one line."""
    blocks: list[Block] = []
    for run in runs:
        rows = _artifact_rows(run.path, out)
        summary = f"{'' if len(runs) == 1 else run.letter + ': '}{run.path}, {count(len(rows))} entries"
        blocks.append(Details(summary, block=Table(["path", "size", "SHA-256"], rows, code=(0, 2))))
    return Section("artifacts", "Artifacts", blocks)


def _artifact_rows(root: Path, out: Path) -> list[list[str]]:
    rows, folders = [], {}
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if not path.is_file() or path.resolve() == out.resolve() or any(part.startswith(".") for part in parts):
            continue
        n_bytes = path.stat().st_size
        if len(parts) > 2:
            files, total = folders.get(parts[:2], (0, 0))
            folders[parts[:2]] = (files + 1, total + n_bytes)
        else:
            rows.append(["/".join(parts), size(n_bytes), file_sha256(path) if n_bytes <= HASHED_BYTES else f"over {size(HASHED_BYTES)}"])
    rows += [["/".join(parts) + "/", size(total), f"{count(files)} files"] for parts, (files, total) in folders.items()]
    return sorted(rows)


def versions_section(runs: Sequence[Run]) -> Section:
    """Packages and machine, as the run recorded them."""
    if not any(run.versions for run in runs):
        return Section("versions", "Versions and machine", [missing("Versions")], narrow=True)
    flat = [_flat(run.versions or {}) for run in runs]
    names = sorted({name for values in flat for name in values}, key=lambda n: (n.startswith("machine."), n))
    rows = [
        [name, *(NOT_RUN if run.versions is None else values.get(name, "–") for run, values in zip(runs, flat, strict=True))]
        for name in names
    ]
    return Section("versions", "Versions and machine", [Table(["", *run_columns(runs)], rows)], narrow=len(runs) < 3)


def recipe_section(runs: Sequence[Run]) -> Section:
    """Where the recipes differ, and each in full."""
    blocks: list[Block] = []
    given = [run for run in runs if run.recipe]
    if not given:
        return Section("recipe", "Recipe", [missing("Recipe")])
    if len(given) > 1:
        flat = [_flat(run.recipe.values) for run in given if run.recipe]
        keys = dict.fromkeys(key for values in flat for key in values)
        rows = [[key, *(values.get(key, "–") for values in flat)] for key in keys if len({values.get(key) for values in flat}) > 1]
        heads = ["key", *(column for column, run in zip(run_columns(runs), runs, strict=True) if run.recipe)]
        blocks.append(Table(heads, rows, "Keys that differ") if rows else Note("The recipes are the same."))
    blocks += [
        Details(f"{name}: recipe.yaml", text=run.recipe.text) for name, run in zip(run_columns(runs), runs, strict=True) if run.recipe
    ]
    return Section("recipe", "Recipe", blocks)


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested mappings as {"section.key": text}."""
    if not isinstance(value, dict):
        return {prefix: str(value)}
    return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{prefix}.{key}" if prefix else str(key)).items()}

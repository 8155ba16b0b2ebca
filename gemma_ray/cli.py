"""The command line: every verb reads a recipe, calls one workload, and prints what it returned.

Results go to stdout (with `--json`, one JSON document and nothing else); progress and errors go to stderr. Exit codes: 0 done, 1 the work
failed, 2 the input was wrong, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
data = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Training data: prepare it, look at it.")
app.add_typer(data, name="data")


def _shipped() -> list[str]:
    from gemma_ray.recipe import shipped_recipes

    return shipped_recipes()


RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="YAML file, or a shipped recipe: " + ", ".join(_shipped()))]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the recipe; may be repeated")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks")]
UrlOption = Annotated[str | None, typer.Option("--url", help="Any OpenAI-compatible endpoint, instead of one of this run's own")]
ModelOption = Annotated[str | None, typer.Option("--model", help="Model to ask the endpoint of --url for")]


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and leave")] = False) -> None:
    """Fine-tune, serve and evaluate Gemma 4 on Ray."""
    if show:
        sys.stdout.write(importlib.metadata.version("gemma-ray") + "\n")
        raise typer.Exit


@app.command()
def quickstart(
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the run [default: runs/quickstart]")] = None,
    recipe: Annotated[str, typer.Option("--recipe", help="Recipe to run")] = "quickstart-cpu",
    overrides: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """The whole road on this machine, from data to report. Run again to continue."""
    with _reported(debug):
        from workloads import quickstart as stage
        from workloads.progress import Progress

        place = [] if out is None else [f"run.dir={json.dumps(str(out))}"]
        loaded = _load(recipe, [*(overrides or []), *place])
        page = stage.run(loaded, Progress())
        _show(as_json, {"report": str(page)}, f"\n{stage.results(loaded)}\n\nreport: {page}")


@app.command()
def doctor(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """What this machine can do, and what is missing. With the command that installs it. Exit code 2 when a stage could not run."""
    with _reported(debug):
        from raycluster.doctor import described, diagnose, healthy

        checks = diagnose()
        ok = healthy(checks)
        _show(as_json, {"healthy": ok, "checks": [dataclasses.asdict(check) for check in checks]}, described(checks))
        if not ok:
            raise SystemExit(2)


@data.command("prepare")
def data_prepare(recipe: RecipeArgument, overrides: SetOption = None, as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Read, clean, tokenise and mask the data, and write it as shards into RUN/data."""
    with _reported(debug):
        from gemma_ray.data.show import summary
        from workloads import prepare
        from workloads.progress import Progress

        loaded = _load(recipe, overrides)
        manifest = prepare.run(loaded, Progress())
        _show(as_json, dataclasses.asdict(manifest), summary(manifest, loaded.run.path / "data"))


@data.command("show")
def data_show(
    recipe: RecipeArgument,
    count: Annotated[int, typer.Option("-n", min=1, help="Examples to show, or rows of the page")] = 3,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with rows, lengths and what was left out")] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """N prepared examples, every token marked by whether it bears loss (green on a terminal, between ⟦ ⟧ elsewhere)."""
    with _reported(debug):
        from gemma_ray.data.page import write_page
        from gemma_ray.data.shards import read_manifest
        from gemma_ray.data.show import marked_text, shown_examples
        from workloads.base import base_model
        from workloads.progress import Progress

        folder = (loaded := _load(recipe, overrides)).run.path / "data"
        read_manifest(folder)  # before a base model is made for its tokenizer
        model = base_model(loaded, Progress())
        if html is None:
            rows = shown_examples(folder, model, count)
            shown = [[dataclasses.asdict(token) for token in row] for row in rows]
            _show(as_json, shown, "\n\n".join(marked_text(row, color=sys.stdout.isatty()) for row in rows))
        else:
            _show(as_json, {"page": str(html)}, str(write_page(folder, model, count, html)))


@app.command()
def plan(
    recipe: RecipeArgument,
    sweep: Annotated[bool, typer.Option("--sweep", help="Compare meshes, remat, micro-batches and blocks, for plan.sweep_limit_s")] = False,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Memory, speed and cost on a TPU, compiled without one. The training step and the serving replica, into RUN/plan.json."""
    with _reported(debug):
        from gemma_ray.planning.page import page_text
        from workloads import plan as stage
        from workloads.progress import Progress

        loaded = _load(recipe, overrides)
        found = stage.sweep(loaded, Progress()) if sweep else stage.run(loaded, Progress())
        _show(as_json, found.to_json(), page_text(found))
        stage.check(found)


@app.command()
def train(recipe: RecipeArgument, overrides: SetOption = None, as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Fine-tune on the recipe's slice, or go on with it. Into RUN/checkpoints and RUN/metrics.jsonl; SIGTERM saves first."""
    with _reported(debug):
        from workloads import train as stage
        from workloads.progress import Progress

        last = stage.run(_load(recipe, overrides), Progress())
        text = f"step {last.step}: loss {last.loss:.4f}, {last.tokens_per_s:,.0f} tokens/s"
        _show(as_json, dataclasses.asdict(last), text)


@app.command()
def convert(
    recipe: RecipeArgument,
    to: Annotated[str | None, typer.Option("--format", help="merged: the adapter folded into the weights")] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """The newest checkpoint as Hugging Face files in RUN/model."""
    with _reported(debug):
        from workloads import convert as stage
        from workloads.progress import Progress

        loaded = _load(recipe, [*(overrides or []), *([f"convert.format={to}"] if to else [])])
        stage.run(loaded, Progress())
        folder = loaded.run.path / "model"
        _show(as_json, {"model": str(folder)}, f"model: {folder}")


@app.command()
def verify(recipe: RecipeArgument, overrides: SetOption = None, as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Prove that RUN/model is the trained model. Logits and greedy tokens by Tunix, transformers and vLLM."""
    with _reported(debug):
        from workloads import verify as stage
        from workloads.progress import Progress

        loaded = _load(recipe, overrides)
        result = stage.run(loaded, Progress())
        _show(as_json, result, f"verified: {loaded.run.path / 'verify.json'}")


@app.command()
def serve(
    recipe: RecipeArgument,
    blocking: Annotated[
        bool, typer.Option("--blocking/--no-blocking", help="Stay until Ctrl-C, or return once the endpoint is ready")
    ] = True,
    stop: Annotated[bool, typer.Option("--stop", help="End the application that --no-blocking left running")] = False,
    base: Annotated[bool, typer.Option("--base", help="Serve the base model too")] = False,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Serve RUN/model behind an OpenAI-compatible endpoint. On Ray Serve and vLLM; the base model while there is no RUN/model."""
    with _reported(debug):
        from workloads import serve as stage
        from workloads.progress import Progress

        loaded = _load(recipe, overrides)
        if stop:
            log = stage.stop(loaded)
            _show(as_json, {"stopped": log is not None}, f"stopped; its log: {log}" if log else "nothing was running")
        elif blocking:

            def ready(served: Any) -> None:
                if as_json:  # else the progress has said it
                    _show(True, {"url": served.url, "models": served.models}, "")
                    sys.stdout.flush()

            stage.run(loaded, Progress(), base=base, on_ready=ready)
        else:
            served = stage.start(recipe, overrides or [], loaded, base=base)
            text = f"{served.url}/v1 serves {', '.join(served.models)}; `{stage.stop_command(recipe, overrides or [])}` ends it"
            _show(as_json, {"url": served.url, "models": served.models}, text)


@app.command("eval")
def evaluate(
    recipe: RecipeArgument,
    samples: Annotated[Path | None, typer.Option("--samples", help="Grade these samples (JSON lines) instead of sampling")] = None,
    base: Annotated[bool, typer.Option("--base", help="Evaluate the base model, into RUN/eval-base")] = False,
    url: UrlOption = None,
    model: ModelOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Parallel sampling, sandboxed grading, pass@k. With confidence intervals, into RUN/eval."""
    with _reported(debug):
        from workloads import eval as stage
        from workloads.endpoint import BASE, TUNED
        from workloads.progress import Progress

        summary = stage.run(_load(recipe, overrides), Progress(), of=BASE if base else TUNED, samples=samples, url=url, model=model)
        _show(as_json, summary, stage.text(summary))
        if summary["harness_errors"]:
            sys.stderr.write(f"error: {summary['harness_errors']} samples could not be graded; see harness_error in results.jsonl\n")
            raise SystemExit(1)


@app.command()
def bench(
    recipe: RecipeArgument,
    url: UrlOption = None,
    model: ModelOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Context × request-rate sweep of an endpoint. TTFT, TPOT and throughput of any OpenAI-compatible one, into RUN/bench."""
    with _reported(debug):
        from gemma_ray.benchmarking.sweep import table
        from workloads import bench as stage
        from workloads.progress import Progress

        cells = stage.run(_load(recipe, overrides), Progress(), url=url, model=model)
        _show(as_json, [cell.to_json() for cell in cells], table(cells))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; several are shown side by side")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Page to write [default: report.html in the run; comparison.html for several]")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """One self-contained HTML page over one or several runs."""
    with _reported(debug):
        from gemma_ray.reporting.page import report as make_page

        page = make_page(runs, out or runs[0] / ("report.html" if len(runs) == 1 else "comparison.html"))
        _show(as_json, {"report": str(page)}, str(page))


def main() -> None:
    """The `gemma-ray` command."""
    app()


def _reported(debug: bool) -> Any:
    from workloads.command import reported

    return reported(debug)


def _load(recipe: str, overrides: list[str] | None) -> Any:
    from gemma_ray.recipe import load_recipe

    return load_recipe(recipe, overrides or [])


def _show(as_json: bool, result: Any, text: str) -> None:
    sys.stdout.write((json.dumps(result, indent=2, default=str) if as_json else text) + "\n")


if __name__ == "__main__":
    main()

"""One self-contained HTML page over the artifacts of one or more runs, side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gemma_ray.artifacts import write_text
from gemma_ray.errors import InputError
from gemma_ray.reporting.provenance import artifacts_section, cost_section, recipe_section, stages_section, versions_section
from gemma_ray.reporting.sections import data_section, latency_section, quality_section, training_section, verification_section
from gemma_ray.reporting.sources import Run, read_runs
from gemma_ray.reporting.summary import summarize_run

HERE = Path(__file__).parent


def report(runs: list[Path], out: Path) -> Path:
    """Write the page to `out` and return it.

    The page loads nothing: styles and plots are in it. Every number on it is in an artifact, or derived from numbers that are. Parts that a
    run does not have are marked "not run". Raises InputError for a folder that is missing or holds no artifact, for a damaged artifact, and
    for a page or a run that the file system refuses.
    """
    with _accessible(out, "written; name another file with --out"):
        if out.is_dir():
            raise InputError(f"'{out}' is a folder: name the file of the report, for example {out / 'report.html'}")
    with _accessible(runs[0] if runs else out, "read; name another run, or mend it"):
        page = _page(runs, out)
    with _accessible(out, "written; name another file with --out"):
        write_text(out, page)
    return out


@contextlib.contextmanager
def _accessible(path: Path, what: str) -> Iterator[None]:
    """Turn what the file system refuses into an InputError that names the file, or else `path`."""
    verb, _, remedy = what.partition("; ")
    try:
        yield
    except OSError as e:
        shown = path if e.filename is None or verb == "written" else e.filename
        raise InputError(f"'{shown}' cannot be {verb} ({e.strerror or e}); {remedy}") from e


def _page(runs: list[Path], out: Path) -> str:
    found = read_runs(runs)
    sections = [
        training_section(found),
        quality_section(found),
        data_section(found),
        verification_section(found),
        latency_section(found),
        stages_section(found),
        versions_section(found),
        cost_section(found),
        artifacts_section(found, out),
        recipe_section(found),
    ]
    return render_page(
        HERE,
        runs=found,
        summaries=[summarize_run(run) for run in found],
        emulated=[_hardware(run, len(found) > 1) for run in found if run.emulated],
        sections=sections,
    )


def render_page(folder: Path, /, **values: Any) -> str:
    """page.html.jinja of a folder, in the report's style."""
    environment = Environment(
        loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style = Markup((HERE / "page.css").read_text(encoding="utf-8"))
    page = environment.get_template("page.html.jinja").render(**values, style=style)
    return page.encode("utf-8", "replace").decode()  # names of files may be no text


def _hardware(run: Run, named: bool) -> str:
    """The emulated slice in words, from the recipe."""
    assert run.recipe is not None
    parts = [run.recipe.get("cluster", "accelerator"), run.recipe.get("cluster", "topology")]
    words = " ".join(str(part) for part in parts if part) or "a slice"
    return f"{run.letter}: {words}" if named else words

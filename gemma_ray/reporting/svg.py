"""matplotlib figures as inline SVG that follows the page's theme.

matplotlib draws with stand-in colours that no plot needs for itself; in the SVG each becomes a CSS variable of page.css, so one picture
serves light and dark. Text stays text, in the page's own font.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID, SURFACE, BASE = "#010101", "#010102", "#010103", "#010104", "#010105"
SERIES = tuple(f"#0102{i:02x}" for i in range(1, 7))
CSS_OF = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", SURFACE: "var(--surface)", BASE: "var(--base)"} | {
    color: f"var(--s{i})" for i, color in enumerate(SERIES, 1)
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gemma-ray",
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "xtick.major.size": 3,
    "figure.facecolor": "none",
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "text.parse_math": False,
}


@dataclass(frozen=True)
class Plot:
    """A picture with what it shows (`title`) and what there is to see in it, for those who do not (`alt`)."""

    title: str
    alt: str
    svg: Markup


def plot(title: str, alt: str, draw: Callable[[Axes], None], size: tuple[float, float]) -> Plot:
    """Draw a figure of `size` inches, which the page scales to its column."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return Plot(title, alt, _inline(buffer.getvalue(), title, alt))


def _inline(svg: str, title: str, alt: str) -> Markup:
    """An SVG file's content as an element of the page: themed, named, its ids unique to it."""
    prefix = "plot-" + re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    found = re.search(r'<svg\b[^>]*viewBox="([^"]+)"[^>]*>', svg, re.S)
    assert found is not None
    body = svg[found.end() :]
    body = re.sub(r"<metadata>.*?</metadata>|<style\b.*?</style>", "", body, flags=re.S)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', body)
    body = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", body)
    for color, css in CSS_OF.items():
        body = body.replace(color, css)
    names = f'<title id="{prefix}-title">{escape(title)}</title><desc id="{prefix}-desc">{escape(alt)}</desc>'
    return Markup(f'<svg viewBox="{found[1]}" role="img" aria-labelledby="{prefix}-title {prefix}-desc">{names}{body}')

"""Numbers as people read them."""

from __future__ import annotations

NBSP = "\N{NO-BREAK SPACE}"


def count(value: int | None) -> str:
    """A whole number as text for people; a dash for None."""
    return "–" if value is None else f"{value:,}"


def percent(value: float | None) -> str:
    """A fraction as per cent."""
    return "–" if value is None else f"{100 * value:.1f}{NBSP}%"


def interval(bounds: tuple[float, float] | None) -> str:
    """A 95 % interval of fractions, as per cent."""
    return "" if bounds is None else f"{100 * bounds[0]:.1f}–{100 * bounds[1]:.1f}{NBSP}%"


def milliseconds(value: float | None) -> str:
    """Without the unit: the column has it."""
    if value is None:
        return "–"
    return f"{value:,.1f}" if abs(value) < 100 else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Seconds as text for people; a dash for None."""
    if seconds is None:
        return "–"
    if seconds < 59.95:
        return f"{seconds:.1f}{NBSP}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d}{NBSP}s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(n_bytes: int) -> str:
    """Bytes as text for people."""
    value = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f}{NBSP}{unit}" if unit == "B" else f"{value:.1f}{NBSP}{unit}"
        value /= 1024
    return f"{value:.1f}{NBSP}TiB"


def usd(value: float) -> str:
    """Cents, or three digits of less than a dollar."""
    return f"${value:,.2f}" if value >= 1 or value == 0 else f"${value:.3g}"


def small(value: float | None) -> str:
    """Four significant digits."""
    return "–" if value is None else f"{value:,.4g}"

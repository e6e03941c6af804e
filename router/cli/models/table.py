"""Plain text for the terminal: tables, times, and text from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns with their names above."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in (names, *rows))
    return "\n".join(line.rstrip() for line in lines)


def ago(seconds: float) -> str:
    """Format an age."""
    return f"{span(seconds)} ago"


def span(seconds: float) -> str:
    """Format a duration."""
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"


def duration(value_ms: float | None) -> str:
    """Format milliseconds; None is an unlimited wait."""
    if value_ms is None:
        return "no limit"
    if value_ms >= 9950:
        return f"{value_ms / 1e3:,.0f} s"
    if value_ms >= 1000:
        return f"{value_ms / 1e3:.1f} s"
    return f"{value_ms:.0f} ms" if value_ms >= 10 or value_ms == 0 else f"{value_ms:.1f} ms"


def clean(value: object) -> str:
    """Replace control characters of the terminal in a line of text from a router, a worker or a key."""
    return "".join(char if char.isprintable() else "?" for char in str(value))

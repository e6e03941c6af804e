"""Tables of plain text."""

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

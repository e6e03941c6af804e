"""Numbers as short texts for people."""

from __future__ import annotations

from collections.abc import Mapping

NONE = "-"
SIZES = ("B", "kB", "MB", "GB", "TB")


def number(value: float) -> str:
    """About three digits: 0.42, 7.5, 312, 4,210, 41.2k, 3.1M."""
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    if value >= 1e4:
        return f"{value / 1e3:.1f}k"
    if value >= 10 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def size(value: float) -> str:
    """Bytes, in units of thousands."""
    power = 0
    while value >= 1000 and power < len(SIZES) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.0f} {SIZES[power]}" if power == 0 or value >= 100 else f"{value:.1f} {SIZES[power]}"


def duration(value_ms: float | None) -> str:
    """Milliseconds; None is a wait without end."""
    if value_ms is None:
        return "no end"
    if value_ms >= 9950:
        return f"{value_ms / 1e3:,.0f} s"
    if value_ms >= 1000:
        return f"{value_ms / 1e3:.1f} s"
    return f"{value_ms:.0f} ms" if value_ms >= 10 or value_ms == 0 else f"{value_ms:.1f} ms"


def ago(seconds: float) -> str:
    """An age."""
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.0f} h ago"


def percent(share: float) -> str:
    """Just below 100 % it has a digit more, so that 99.8 % is not all."""
    return f"{100 * share:.1f} %" if 0.99 < share < 0.9995 else f"{100 * share:.0f} %"


def percentile(times: Mapping[str, float], share: str) -> str:
    """One of `Percentiles`, by its name."""
    return duration(times[share]) if times["num"] else NONE

"""Tables on the terminal, and results as JSON files."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.load.summary import OK, QUANTILES, Distribution, RequestRecord, Summary
from common.errors import ConfigError

PLAIN_WIDTH = 160
LATENCIES = (
    ("TTFT", "ttft_ms"),
    ("TPOT", "tpot_ms"),
    ("ITL", "itl_ms"),
    ("e2e", "e2e_ms"),
)


def open_console() -> Console:
    """The terminal, or a console wide enough for every table when the output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int] = (0,)
) -> None:
    """Print rows of cells under `columns`; those at the indices `left` are text, all others are numbers."""
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index in left else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_summary(console: Console, summary: Summary, *, title: str, slo: str = "") -> None:
    """Print latencies as a table, then rates, then failures with their reasons."""
    columns = ("ms", "mean", *(f"p{q}" for q in QUANTILES), "max")
    rows = [(name, *_cells(getattr(summary, attribute))) for name, attribute in LATENCIES]
    print_table(console, title, columns, rows)
    for name, value in _rates(summary, slo):
        console.print(f"{name:<22}{value}", highlight=False, markup=False)
    for outcome, count in summary.outcomes.items():
        if outcome != OK:
            reason = summary.messages.get(outcome, "")
            console.print(f"failed: {count} x {outcome} {reason[:160]}", highlight=False, markup=False)


def _cells(latency: Distribution) -> list[str]:
    if not latency.count:
        return ["-"] * (len(QUANTILES) + 2)
    return [
        f"{value:,.1f}" for value in (latency.mean, latency.p50, latency.p90, latency.p95, latency.p99, latency.max)
    ]


def _rates(summary: Summary, slo: str) -> list[tuple[str, str]]:
    rows = [
        ("requests", f"{summary.num_ok} of {summary.num_requests} in {summary.duration_s:.1f} s"),
        ("request rate", f"{summary.request_rate:.2f} /s"),
        ("output", f"{summary.output_tokens_per_s:,.1f} tok/s ({summary.output_tokens:,} tokens)"),
        ("input", f"{summary.input_tokens_per_s:,.1f} tok/s ({summary.input_tokens:,} tokens)"),
    ]
    if summary.cached_tokens:
        share = summary.cached_tokens / max(1, summary.input_tokens)
        rows.append(("from prefix cache", f"{summary.cached_tokens:,} input tokens ({share:.0%})"))
    if slo:
        share = summary.num_good / max(1, summary.num_requests)
        rows.append(("goodput", f"{summary.goodput:.2f} requests/s within {slo} ({share:.0%} of all)"))
    if summary.late_ms.p99 > 1:
        rows.append(("sent late by", f"p99 {summary.late_ms.p99:.1f} ms (the load generator's own delay)"))
    return rows


def result(
    summary: Summary, records: Sequence[RequestRecord], conditions: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """A run as JSON values. Times of requests are in seconds after the first start."""
    origin = min((record.start for record in records if record.start), default=0.0)
    return {
        "conditions": conditions,
        "settings": settings,
        "summary": _rounded(asdict(summary)),
        "requests": [_request(record, origin) for record in records],
    }


def check_writable(**options: Path | str | None) -> None:
    """Check that files can be written at the end of a run. Raises ConfigError with the name of the first wrong option.

    Creates the folders, but leaves no new file.
    """
    for name, value in options.items():
        if value:
            path = Path(value)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                is_new = not path.exists()
                path.open("ab").close()
                if is_new:
                    path.unlink()
            except OSError as error:
                raise ConfigError(name, str(path), f"a file that can be written ({error.strerror})") from error


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _request(record: RequestRecord, origin: float) -> dict[str, Any]:
    row: dict[str, Any] = {"index": record.index, "start_s": round(record.start - origin, 4), "outcome": record.outcome}
    if record.ok:
        row |= {
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "output_tokens": record.output_tokens,
            "ttft_ms": round(record.ttft_s * 1000, 2),
            "e2e_ms": round(record.e2e_s * 1000, 2),
        }
    return row


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 4) if isinstance(value, float) else value

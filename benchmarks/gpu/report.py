"""The GPU benchmark's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from benchmarks.gpu.chip import Chip
from benchmarks.load.report import print_table


def print_chip(console: Console, chip: Chip, conditions: Mapping[str, Any]) -> None:
    names = ("torch", "triton", "cuda", "capability", "multiprocessors", "memory_gib", "l2_mib")
    known = ", ".join(f"{name} {conditions[name]}" for name in names if conditions.get(name))
    console.print(f"{chip.name}: {known}", highlight=False, markup=False)
    rates = f"copy {chip.copy_rate / 1e9:,.0f} GB/s (read + written), products {chip.matmul_rate / 1e12:,.1f} TFLOP/s"
    console.print(rates, highlight=False)


def print_problems(console: Console, problems: Mapping[str, str]) -> None:
    """Print the failed checks, or that all passed."""
    wrong = {name: problem for name, problem in problems.items() if problem}
    for name, problem in wrong.items():
        console.print(f"WRONG  {name}: {problem}", highlight=False, markup=False)
    if wrong:
        console.print(f"{len(wrong)} of {len(problems)} checks failed: these kernels are not timed.", highlight=False)
    else:
        console.print(f"all {len(problems)} checks passed", highlight=False)


def print_kernels(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    peers = list(dict.fromkeys(name for row in rows for name in row["peers_us"]))
    columns = ("kernel", "size", "us", "floor us", "of floor", "bound by", "GB/s", "TFLOP/s")
    shown = []
    for row in rows:
        times = (row["peers_us"].get(peer, "") for peer in peers)
        cells = [row["kernel"], row["size"], f"{row['us']:,.1f}", f"{row['floor_us']:,.1f}", f"{row['of_floor']:.1%}"]
        cells += [row["bound"], f"{row['gb_per_s']:,.0f}", f"{row['tflop_per_s']:,.1f}"]
        shown.append([*cells, *(f"{time:,.1f}" if isinstance(time, float) else "-" for time in times)])
    print_table(console, "Kernels, medians", (*columns, *(f"{peer}, us" for peer in peers)), shown, left=(0, 1))
    reasons = {f"{peer}: {time}" for row in rows for peer, time in row["peers_us"].items() if isinstance(time, str)}
    for reason in sorted(reasons):
        console.print(f"not measured: {reason}", highlight=False, markup=False)


def print_engine(console: Console, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    print_rows(console, "Prefill, one prompt", found["prefill"])
    print_rows(console, "Decode steps", found["decode"])


def print_rows(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with the rows' names as columns, if there are rows."""
    if not rows:
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    texts = [index for index, name in enumerate(names) if isinstance(rows[0].get(name), str)]
    cells = [[_cell(row.get(name, "")) for name in names] for row in rows]
    print_table(console, title, [name.replace("_", " ") for name in names], cells, left=texts)


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)

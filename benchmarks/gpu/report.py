"""Plain text tables of a run. Has no imports, because a GPU machine may only have torch and Triton."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any


def print_chip(chip: Mapping[str, Any], conditions: Mapping[str, Any]) -> None:
    names = ("torch", "triton", "cuda", "capability", "multiprocessors", "memory_gib", "shared_kib", "l2_mib")
    known = ", ".join(f"{name} {conditions[name]}" for name in names if conditions.get(name))
    copy, products = chip["copy_rate"] / 1e9, chip["matmul_rate"] / 1e12
    print(f"{chip['name']}: {known}")
    print(f"copy {copy:,.0f} GB/s (read + written), products {products:,.1f} TFLOP/s", flush=True)


def print_kernels(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    peers = list(dict.fromkeys(name for row in rows for name in row["peers_us"]))
    columns = ("kernel", "size", "us", "floor us", "of floor", "bound by", "GB/s", "TFLOP/s")
    shown = []
    for row in rows:
        times = (row["peers_us"].get(peer, "") for peer in peers)
        cells = [row["kernel"], row["size"], f"{row['us']:,.1f}", f"{row['floor_us']:,.1f}", f"{row['of_floor']:.1%}"]
        cells += [row["bound"], f"{row['gb_per_s']:,.0f}", f"{row['tflop_per_s']:,.1f}"]
        shown.append([*cells, *(f"{time:,.1f}" if isinstance(time, float) else "-" for time in times)])
    print_table(f"{title}, medians", (*columns, *(f"{peer}, us" for peer in peers)), shown, left=(0, 1))
    reasons = {f"{peer}: {time}" for row in rows for peer, time in row["peers_us"].items() if isinstance(time, str)}
    for reason in sorted(reasons):
        print(f"not measured: {reason}", flush=True)


def print_rows(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with the rows' names as columns, if there are rows."""
    if not rows:
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    texts = [index for index, name in enumerate(names) if isinstance(rows[0].get(name), str)]
    cells = [[_cell(row.get(name, "")) for name in names] for row in rows]
    print_table(title, [name.replace("_", " ") for name in names], cells, left=texts)


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)
) -> None:
    """Print rows of cells below `columns`; columns at the indices `left` are text, all others are numbers."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        sides = ("<" if index in left else ">" for index in range(len(cells)))
        return "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=True))

    print(
        f"\n{title}", line(columns), "  ".join("-" * width for width in widths), *map(line, rows), sep="\n", flush=True
    )


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)

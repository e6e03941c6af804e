"""Request traces of real services: arrivals, lengths and shared prefixes.

Two public formats, plain or gzipped, which the first line distinguishes:

- Azure LLM inference traces: CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens.
- Mooncake traces: JSON lines with timestamp (ms), input_length, output_length and hash_ids, one id for each block of
  512 prompt tokens; requests with equal leading ids share that prefix.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

MOONCAKE_BLOCK_TOKENS = 512
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(Exception):
    """A trace file cannot be read. The message names file, line and the expected form."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request: seconds after the trace's first, lengths in tokens, ids of its 512-token prompt blocks (or none)."""

    arrival_s: float
    input_len: int
    output_len: int
    block_ids: tuple[int, ...] = ()


def read_trace(path: Path, limit: int = 0, *, begin: float = 0.0) -> list[TraceRow]:
    """The trace's first `limit` requests (0: all), by arrival. Raises TraceError.

    `begin`: this share of the trace's requests is left out before them.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            rows = list(itertools.islice(_parse(path, lines), None if begin else limit or None))
    except OSError as error:
        raise TraceError(f"{path}: {error}") from error
    if begin:
        rows = rows[int(begin * len(rows)) :][: limit or None]
    if not rows:
        raise TraceError(f"{path}: holds no requests")
    first = min(row.arrival_s for row in rows)
    moved = (TraceRow(row.arrival_s - first, row.input_len, row.output_len, row.block_ids) for row in rows)
    return sorted(moved, key=lambda row: row.arrival_s)


def _parse(path: Path, lines: Iterable[str]) -> Iterator[TraceRow]:
    numbered = ((number, line.strip()) for number, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        return
    number, line = first
    body: Iterator[tuple[int, str]] = numbered
    if line.startswith("{"):
        parse, body = _mooncake_row, itertools.chain([first], numbered)
    elif tuple(name.strip() for name in line.lstrip("\ufeff").split(",")) == AZURE_COLUMNS:
        parse = _azure_row
    else:
        raise TraceError(f"{path}:{number}: neither the header {','.join(AZURE_COLUMNS)} nor a JSON object")
    for number, line in body:
        try:
            row = parse(line)
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path}:{number}: {line[:80]!r} is not a request ({error!r})") from error
        if row.input_len < 1 or row.output_len < 0:
            raise TraceError(f"{path}:{number}: {row.input_len} input and {row.output_len} output tokens")
        yield row


def _azure_row(line: str) -> TraceRow:
    stamp, input_len, output_len = next(csv.reader([line]))
    return TraceRow(datetime.fromisoformat(stamp).timestamp(), int(input_len), int(output_len))


def _mooncake_row(line: str) -> TraceRow:
    row = json.loads(line)
    block_ids = tuple(int(block) for block in row.get("hash_ids", ()))
    return TraceRow(float(row["timestamp"]) / 1000, int(row["input_length"]), int(row["output_length"]), block_ids)

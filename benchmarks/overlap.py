"""Does the transfer hide behind the prefill? TTFT and the gap to the second token, disaggregated against local.

Both stacks run side by side, idle but for one request at a time, which goes to each in turn: what the machine does to
one it does to the other. The worker that prefills has the same threads and the same chunk size in both.
Prefix caches are off and every prompt is new.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.arms import Arm, Target, scrape, script_parser
from benchmarks.conditions import conditions
from benchmarks.report import open_console, write_json
from benchmarks.stack import Stack
from benchmarks.summary import RequestRecord
from benchmarks.time_limit import time_limit

PROGRAM = "python -m benchmarks.overlap"
LENGTHS = (128, 512, 1500)
OUTPUT_LEN = 8
REST_S = 0.1
"""Between two requests, so that nothing of the last one, nor of reading metrics, runs beside the next."""
DISAGGREGATED, LOCAL = "disaggregated", "local"
EXPOSED_TRANSFER = "diptych_kv_exposed_transfer_seconds_sum"
PREFILL = "vllm:request_prefill_time_seconds_sum"


@dataclass
class Cell:
    """Samples in ms of one prompt length on one stack."""

    ttft: list[float] = field(default_factory=list)
    first_gap: list[float] = field(default_factory=list)
    later_gap: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)

    def add(self, record: RequestRecord) -> None:
        gaps = [gap * 1000 for gap in record.itls_s]
        self.ttft.append(record.ttft_s * 1000)
        self.first_gap.append(gaps[0])
        self.later_gap.append(statistics.median(gaps[1:]))

    def medians(self) -> dict[str, float]:
        """By name, in ms; without those that this stack does not have."""
        named = {f"{name}_ms": values for name, values in vars(self).items() if values}
        return {name: round(statistics.median(values), 3) for name, values in named.items()}


def arms(threads: int, chunk: int) -> tuple[Arm, Arm]:
    """The same compute for prompts: the prefill worker's threads and chunk are the local worker's."""
    flags = ("--local-prefill-chunk", str(chunk))
    return (
        Arm(DISAGGREGATED, prefill=1, prefill_threads=threads, decode_threads=threads, decode_flags=flags),
        Arm(LOCAL, prefill=0, decode_threads=threads, decode_flags=flags),
    )


async def one_request(target: Target, length: int, index: int, seed: int) -> RequestRecord:
    """Raises RuntimeError when it fails: a comparison of failures says nothing."""
    record = RequestRecord(index)
    await target.client.complete(target.workload(length, OUTPUT_LEN, seed).request(index), record)
    if not record.ok or len(record.token_times) < 3:
        raise RuntimeError(f"a prompt of {length} tokens ended as {record.outcome!r}: {record.message}")
    return record


def transfer_times(stack: Stack) -> tuple[float, float]:
    """Seconds of exposed transfer and of prefill so far."""
    exposed = sum(scrape(worker).get(EXPOSED_TRANSFER, 0.0) for worker in stack.workers("decode"))
    prefill = sum(scrape(worker).get(PREFILL, 0.0) for worker in stack.workers("prefill"))
    return exposed, prefill


async def measure(stacks: dict[str, Stack], repeats: int, seed: int, vocab_size: int) -> dict[str, dict[int, Cell]]:
    """Cells by stack and prompt length. The order of the two stacks alternates."""
    targets = {name: Target.of(stack.url, vocab_size=vocab_size) for name, stack in stacks.items()}
    cells = {name: {length: Cell() for length in LENGTHS} for name in stacks}
    for target in targets.values():
        for warmup, length in enumerate(LENGTHS):
            await one_request(target, length, 10**6 + warmup, seed)
    with Progress() as progress:
        bar = progress.add_task("requests", total=repeats * len(LENGTHS) * len(stacks))
        for repeat in range(repeats):
            for length in LENGTHS:
                for name in sorted(stacks, reverse=bool(repeat % 2)):
                    cell = cells[name][length]
                    before = transfer_times(stacks[name])
                    await asyncio.sleep(REST_S)
                    cell.add(await one_request(targets[name], length, repeat, seed + length))
                    if name == DISAGGREGATED:
                        exposed, prefill = transfer_times(stacks[name])
                        cell.exposed.append((exposed - before[0]) * 1000)
                        cell.prefill.append((prefill - before[1]) * 1000)
                    progress.advance(bar)
    for target in targets.values():
        await target.client.close()
    return cells


def compare(cells: dict[str, dict[int, Cell]]) -> list[dict[str, Any]]:
    """One row a prompt length: both stacks' medians and the two ratios that matter."""
    rows: list[dict[str, Any]] = []
    for length in LENGTHS:
        remote, local = cells[DISAGGREGATED][length].medians(), cells[LOCAL][length].medians()
        ratios = {"ttft_ratio": round(remote["ttft_ms"] / local["ttft_ms"], 4)}
        if remote.get("prefill_ms"):
            ratios["exposed_share_of_prefill"] = round(remote["exposed_ms"] / remote["prefill_ms"], 4)
        rows.append({"prompt_tokens": length, DISAGGREGATED: remote, LOCAL: local, **ratios})
    return rows


def print_rows(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="medians in ms", title_justify="left")
    for name in (
        "prompt",
        "TTFT disagg.",
        "TTFT local",
        "ratio",
        "1st gap disagg.",
        "1st gap local",
        "later gap",
        "exposed transfer",
        "of prefill",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        remote, local = row[DISAGGREGATED], row[LOCAL]
        numbers = (remote["ttft_ms"], local["ttft_ms"], row["ttft_ratio"], remote["first_gap_ms"])
        share = f"{row['exposed_share_of_prefill']:.1%}" if "exposed_share_of_prefill" in row else "-"
        table.add_row(
            str(row["prompt_tokens"]),
            *(f"{number:,.2f}" for number in numbers),
            f"{local['first_gap_ms']:.2f}",
            f"{local['later_gap_ms']:.2f}",
            f"{remote.get('exposed_ms', 0.0):.2f}",
            share,
        )
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = script_parser(PROGRAM, __doc__ or "")
    parser.add_argument("--threads", type=int, default=2, help="of each worker")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens computed in one step, on both stacks")
    parser.add_argument("--repeats", type=int, default=11, help="requests for each length and stack")
    options = parser.parse_args(argv)
    pair = arms(options.threads, options.chunk)
    flags = ("--block-size", str(options.block_size), "--no-enable-prefix-caching")
    with ExitStack() as running:
        stacks = {
            arm.name: running.enter_context(arm.stack(options.model, options.dtype, flags, options.log_dir))
            for arm in pair
        }
        cells = asyncio.run(measure(stacks, options.repeats, options.seed, options.vocab_size))
    rows = compare(cells)
    print_rows(open_console(), rows)
    if options.output:
        setup = {arm.name: arm.describe() for arm in pair}
        more = {"model": options.model, "dtype": options.dtype, "chunk": options.chunk, "repeats": options.repeats}
        samples = {
            f"{name} {length}": {key: [round(value, 3) for value in values] for key, values in vars(cell).items()}
            for name, by_length in cells.items()
            for length, cell in by_length.items()
        }
        found = conditions(PROGRAM, argv, **more, stacks=setup)
        write_json(options.output, {"conditions": found, "rows": rows, "samples_ms": samples})
    return 0


if __name__ == "__main__":
    with time_limit(0.0):  # told to end, it ends what it started
        raise SystemExit(main())

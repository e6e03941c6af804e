"""How well the transfer hides behind the prefill: TTFT and the gap to the second token, disaggregated against local.

Both stacks run side by side, and each request goes to both in turn, one at a time, so that the machine's noise affects
both alike. The worker that prefills has the same threads and the same chunk size in both. Prefix caches are off and
every prompt is new.
"""

from __future__ import annotations

import asyncio
import statistics
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.arms import Arm, Target, scrape, stack_parser
from benchmarks.load.report import open_console, print_table
from benchmarks.load.summary import RequestRecord
from benchmarks.script import in_turns, run, write_result
from benchmarks.stack import Stack

PROGRAM = "python -m benchmarks.overlap"
LENGTHS = (128, 512, 1500)
OUTPUT_LEN = 8
REST_S = 0.1
"""Between two requests, so that work of the last one and the reading of metrics do not run beside the next."""
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
        """Medians by name, in ms, without those that this stack does not have."""
        named = {f"{name}_ms": values for name, values in vars(self).items() if values}
        return {name: round(statistics.median(values), 3) for name, values in named.items()}


def arms(threads: int, chunk: int) -> tuple[Arm, Arm]:
    """Both arms, in which the worker that prefills has the same threads and chunk size."""
    flags = ("--local-prefill-chunk", str(chunk))
    return (
        Arm(DISAGGREGATED, prefill=1, prefill_threads=threads, decode_threads=threads, decode_flags=flags),
        Arm(LOCAL, prefill=0, decode_threads=threads, decode_flags=flags),
    )


async def one_request(target: Target, length: int, index: int, seed: int) -> RequestRecord:
    """Send one request. Raises RuntimeError when it fails."""
    record = RequestRecord(index)
    await target.client.complete(target.workload(length, OUTPUT_LEN, seed).request(index), record)
    if not record.ok or len(record.token_times) < 3:
        raise RuntimeError(f"a prompt of {length} tokens ended as {record.outcome!r}: {record.message}")
    return record


def transfer_times(stack: Stack) -> tuple[float, float]:
    """Seconds of exposed transfer and of prefill since the start."""
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
                for name in in_turns(tuple(stacks), repeat):
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
    """One row a prompt length: both stacks' medians, the ratio of their TTFTs and the share of exposed transfer."""
    rows: list[dict[str, Any]] = []
    for length in LENGTHS:
        remote, local = cells[DISAGGREGATED][length].medians(), cells[LOCAL][length].medians()
        ratios = {"ttft_ratio": round(remote["ttft_ms"] / local["ttft_ms"], 4)}
        if remote.get("prefill_ms"):
            ratios["exposed_share_of_prefill"] = round(remote["exposed_ms"] / remote["prefill_ms"], 4)
        rows.append({"prompt_tokens": length, DISAGGREGATED: remote, LOCAL: local, **ratios})
    return rows


def print_rows(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    columns = ("prompt", "TTFT disagg.", "TTFT local", "ratio", "1st gap disagg.", "1st gap local")
    shown = []
    for row in rows:
        remote, local = row[DISAGGREGATED], row[LOCAL]
        numbers = [remote["ttft_ms"], local["ttft_ms"], row["ttft_ratio"], remote["first_gap_ms"]]
        numbers += [local["first_gap_ms"], local["later_gap_ms"], remote.get("exposed_ms", 0.0)]
        share = f"{row['exposed_share_of_prefill']:.1%}" if "exposed_share_of_prefill" in row else "-"
        shown.append((str(row["prompt_tokens"]), *(f"{number:,.2f}" for number in numbers), share))
    more = ("later gap", "exposed transfer", "of prefill")
    print_table(console, "medians in ms", (*columns, *more), shown, left=())


def parse(argv: Sequence[str]) -> Namespace:
    parser = stack_parser(PROGRAM, __doc__)
    parser.add_argument("--threads", type=int, default=2, help="of each worker")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens computed in one step, on both stacks")
    parser.add_argument("--repeats", type=int, default=11, help="requests for each length and stack")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
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
    samples = {
        f"{name} {length}": {key: [round(value, 3) for value in values] for key, values in vars(cell).items()}
        for name, by_length in cells.items()
        for length, cell in by_length.items()
    }
    more = {name: getattr(options, name) for name in ("model", "dtype", "chunk", "repeats")}
    setup = {arm.name: arm.describe() for arm in pair}
    write_result(options, PROGRAM, argv, {"rows": rows, "samples_ms": samples}, **more, stacks=setup)
    return 0


if __name__ == "__main__":
    run(main)

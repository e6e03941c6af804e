"""How long prompts disturb running streams: disaggregated against local chunked prefill.

Eight streams decode without end; after a quiet window, long prompts arrive at a steady pace. The result is the gaps
between the streams' tokens in each window. Arms (one decode worker each, prompts always new):

    1P1D pinned              prefill worker on core 0, decode worker on core 1, one thread each
    0P1D pinned, one core    the decode worker alone on core 1: the same decode hardware, prompts share it
    0P1D pinned, two cores   the decode worker alone on cores 0 and 1, two threads: the same total hardware
    1P1D unpinned            one thread each, anywhere
    0P1D unpinned            two threads, anywhere

Router and load generator are never pinned, as on any machine of this size.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.arms import Arm, Target, stack_parser
from benchmarks.load.load import Load
from benchmarks.load.plot import plain_numbers, plot_cdf, save
from benchmarks.load.report import open_console, print_table
from benchmarks.load.summary import INTERRUPTED, Distribution, RequestRecord
from benchmarks.script import run, settings_of, write_result

PROGRAM = "python -m benchmarks.interference"
PROMPT_OUTPUT_LEN = 4
ARMS = (
    Arm("1P1D pinned", prefill=1, prefill_cores=(0,), decode_cores=(1,)),
    Arm("0P1D pinned, one core", prefill=0, decode_cores=(1,)),
    Arm("0P1D pinned, two cores", prefill=0, decode_threads=2, decode_cores=(0, 1)),
    Arm("1P1D unpinned", prefill=1),
    Arm("0P1D unpinned", prefill=0, decode_threads=2),
)


@dataclass
class Run:
    """One run of an arm. Gaps of the eight streams: (seconds after the long prompts began, gap in seconds)."""

    gaps: list[tuple[float, float]]
    ttfts: list[float]
    duration_s: float

    def row(self) -> dict[str, Any]:
        quiet = Distribution.of_seconds(gap for at, gap in self.gaps if at <= 0)
        busy = Distribution.of_seconds(self.busy_gaps())
        return {
            "quiet_p50_ms": quiet.p50,
            "quiet_p99_ms": quiet.p99,
            "p50_ms": busy.p50,
            "p99_ms": busy.p99,
            "max_ms": busy.max,
            "tokens_per_s": busy.count / self.duration_s,
            "prompt_ttft_p50_ms": Distribution.of_seconds(self.ttfts).p50,
            "prompts": len(self.ttfts),
        }

    def busy_gaps(self) -> list[float]:
        return [gap for at, gap in self.gaps if at > 0]


@dataclass
class Result:
    """All runs of one arm."""

    arm: Arm
    runs: list[Run] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        """The median of each number of `Run.row` over the runs."""
        rows = [run.row() for run in self.runs]
        return {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}


async def run_arm(target: Target, options: Namespace, seed: int) -> Run:
    """Streams alone for `quiet_s`, then with long prompts for `busy_s`. Raises RuntimeError when a request fails."""
    streams = Load(target.client, target.workload(options.stream_input_len, options.stream_output_len, seed))
    prompts = Load(target.client, target.workload(options.prompt_len, PROMPT_OUTPUT_LEN, seed + 1))
    decoding = asyncio.create_task(streams.closed_loop(options.streams))
    while len(streams.records) < options.streams or not all(record.token_times for record in streams.records):
        if decoding.done():
            decoding.result()
        _refuse_failures(streams.records)
        await asyncio.sleep(0.05)
    await asyncio.sleep(options.quiet_s)
    begin = time.perf_counter()
    arriving = asyncio.create_task(prompts.open_loop(itertools.count(0.0, options.every_s)))
    await asyncio.sleep(options.busy_s)
    end = time.perf_counter()
    for task in (arriving, decoding):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    _refuse_failures([*streams.records, *prompts.records])
    gaps = [
        (late - begin, late - early)
        for record in streams.records
        for early, late in itertools.pairwise(record.token_times)
        if begin - options.quiet_s < late <= end
    ]
    ttfts = [record.ttft_s for record in prompts.records if not math.isnan(record.ttft_s)]
    return Run(gaps, ttfts, end - begin)


def _refuse_failures(records: Sequence[RequestRecord]) -> None:
    for record in records:
        if record.outcome not in ("", INTERRUPTED) and not record.ok:
            raise RuntimeError(f"a request ended as {record.outcome!r}: {record.message}")


def measure(arm: Arm, options: Namespace, seed: int) -> Run:
    """Start the arm's stack, warm it up and measure it."""
    flags = ("--block-size", str(options.block_size), "--no-enable-prefix-caching")
    with (
        arm.stack(options.model, options.dtype, flags, options.log_dir) as stack,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        target = Target.of(stack.url, vocab_size=options.vocab_size)
        warmup = Load(target.client, target.workload(options.prompt_len, 8, seed + 2), num_requests=2)
        runner.run(warmup.closed_loop(1))
        measured = runner.run(run_arm(target, options, seed))
        runner.run(target.client.close())
    return measured


def print_results(console: Console, results: Sequence[Result]) -> None:
    columns = ("", "quiet p50", "quiet p99", "p50", "p99", "max", "tok/s", "prompt TTFT p50", "prompts")
    rows = [(result.arm.name, *(f"{value:,.1f}" for value in result.medians().values())) for result in results]
    print_table(console, "inter-token latency of the streams, ms", columns, rows)


def plot(path: Path, results: Sequence[Result], title: str) -> None:
    """Draw the distribution of gaps while prompts arrive, and beside it each gap of the first run over time."""
    figure = Figure(figsize=(14, 6), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot_cdf(left, "gaps between tokens while prompts arrive", {r.arm.name: _all_busy_gaps(r) for r in results})
    left.set(xscale="log", xlabel="ms (log)", ylim=(0.5, 1.002))
    plain_numbers(left.xaxis)
    for result in results:
        gaps = result.runs[0].gaps
        right.plot([at for at, _ in gaps], [gap * 1000 for _, gap in gaps], ".", markersize=3, label=result.arm.name)
    right.axvline(0, color="#444444", linewidth=1)
    right.set(title="each gap", xlabel="seconds after the first long prompt", ylabel="ms (log)", yscale="log")
    plain_numbers(right.yaxis)
    right.grid(alpha=0.2)
    right.legend(fontsize=8, loc="upper left", markerscale=3)
    save(figure, path, title)


def _all_busy_gaps(result: Result) -> list[float]:
    return [gap for run in result.runs for gap in run.busy_gaps()]


def parse(argv: Sequence[str]) -> Namespace:
    parser = stack_parser(PROGRAM, (__doc__ or "").partition("\n")[0], plot=True)
    parser.add_argument("--streams", type=int, default=8, help="streams that decode all the time")
    parser.add_argument("--stream-input-len", type=int, default=64, help="their prompts, in tokens")
    parser.add_argument("--stream-output-len", type=int, default=1900, help="their outputs; a new stream follows")
    parser.add_argument("--prompt-len", type=int, default=1500, help="the long prompts, in tokens")
    parser.add_argument("--every-s", type=float, default=4.0, help="seconds between two long prompts")
    parser.add_argument("--quiet-s", type=float, default=5.0, help="seconds measured before the first long prompt")
    parser.add_argument("--busy-s", type=float, default=24.0, help="seconds measured after it")
    parser.add_argument("--rounds", type=int, default=3, help="times that all arms are run, one after the other")
    parser.add_argument("--arms", default="", help="only arms whose name contains this")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options, console = parse(argv), open_console()
    results = [Result(arm) for arm in ARMS if options.arms in arm.name]
    for number in range(options.rounds):
        for result in results:
            console.print(f"round {number + 1} of {options.rounds}: {result.arm.name}", highlight=False)
            result.runs.append(measure(result.arm, options, options.seed + 10 * number))
    print_results(console, results)
    rows = [{"arm": r.arm.name, **r.medians(), "setup": r.arm.describe()} for r in results]
    runs = {r.arm.name: [each.row() for each in r.runs] for r in results}
    write_result(options, PROGRAM, argv, {"rows": rows, "runs": runs}, settings=settings_of(options))
    if options.plot:
        load = f"{options.streams} streams, a {options.prompt_len}-token prompt every {options.every_s:g} s"
        plot(options.plot, results, f"{options.model}: {load}")
    return 0


if __name__ == "__main__":
    run(main)

"""What changing roles is worth: a load that alternates between long prompts and long answers, on paced workers.

    python -m benchmarks.alternating --output FILE --plot FILE

Four workers are split in every fixed way (0P4D, which computes prompts beside answers, to 3P1D), and once more as 2P2D
with `--role-change`. All get the same requests at the same times. Goodput counts requests that met both goals, over the
time of arrivals. Workers wait as long as `data/alternating.json` says; router, schedulers, sockets and KV bytes are
real. Of each change of a role it is measured how long after the router's decision the worker has done the first work of
the new one (`first_work.py`).
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import uvloop
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.alternating import first_work
from benchmarks.alternating.first_work import RoleChange, role_changes
from benchmarks.arms import Target
from benchmarks.load.load import Load
from benchmarks.load.plot import save
from benchmarks.load.report import open_console, print_table
from benchmarks.load.summary import Distribution, RequestRecord
from benchmarks.load.workload import poisson_arrivals
from benchmarks.paced.stack import PacedStack
from benchmarks.script import in_turns, run, script_parser, settings_of, write_result
from benchmarks.stack import StackSettings
from common.wire.message_fields import ROLES

PROGRAM: Final = "python -m benchmarks.alternating"
COEFFICIENTS: Final = Path(__file__).parent.parent / "data" / "alternating.json"
POLL_S: Final = 1.0


@dataclass(frozen=True)
class Split:
    """A number of workers of each kind, whose roles are pinned or change."""

    name: str
    prefill: int
    decode: int
    changes: bool = False

    def stack(self, options: Namespace) -> PacedStack:
        change = ("--role-change", "--log-json") if self.changes else ()
        timing = ("--role-change-after-s", str(options.after_s), "--role-change-interval-s", str(options.interval_s))
        return PacedStack(
            StackSettings(
                self.prefill,
                self.decode,
                worker_flags=change,
                router_flags=(
                    *("--slo-ttft-ms", str(options.slo_ttft_ms), "--slo-tpot-ms", str(options.slo_tpot_ms)),
                    *(change + timing if change else ()),
                ),
                log_dir=options.log_dir / self.name.replace(" ", "-") if options.log_dir else None,
            ),
            coefficients=options.coefficients,
            max_model_len=8192,
        )


SPLITS: Final = (
    *(Split("0P4D", 0, 4), Split("1P3D", 1, 3), Split("2P2D", 2, 2), Split("3P1D", 3, 1)),
    Split("changing", 2, 2, changes=True),
)


@dataclass(frozen=True)
class Phase:
    """One kind of request for a while: lengths in tokens, requests a second, and when it begins."""

    name: str
    input_len: int
    output_len: int
    rate: float
    begins_s: float


def phases(options: Namespace) -> list[Phase]:
    """Long prompts and long answers in turn, `--phases` in all, each of `--phase-s` seconds."""
    kinds = (
        ("long prompts", options.prompt_len, options.short_output_len, options.prompt_rate),
        ("long answers", options.short_input_len, options.answer_len, options.answer_rate),
    )
    return [Phase(*kinds[number % 2], number * options.phase_s) for number in range(options.phases)]


@dataclass
class Run:
    """One split under the whole load: each phase's requests, (second, prefill workers, decode workers), and changes."""

    records: list[list[RequestRecord]]
    seconds: float
    goals_ms: tuple[float, float]
    workers: list[tuple[float, int, int]] = field(default_factory=list)
    changes: list[RoleChange] = field(default_factory=list)

    def goodput(self) -> float:
        """Requests a second of arrivals that met both goals."""
        return sum(self.num_good(records) for records in self.records) / self.seconds

    def num_good(self, records: Sequence[RequestRecord]) -> int:
        return sum(record.meets(*self.goals_ms) for record in records)

    def row(self) -> dict[str, Any]:
        records = [record for phase in self.records for record in phase]
        ttft = Distribution.of_seconds(record.ttft_s for record in records if record.ok)
        tpot = Distribution.of_seconds(record.tpot_s for record in records if record.ok)
        return {
            "goodput": self.goodput(),
            "met": sum(self.num_good(phase) for phase in self.records) / len(records),
            "met_by_phase": [self.num_good(phase) / len(phase) for phase in self.records if phase],
            "refused": sum(record.outcome == "http 429" for record in records),
            "failed": sum(not record.ok and record.outcome != "http 429" for record in records),
            "ttft_p50_ms": ttft.p50,
            "ttft_p95_ms": ttft.p95,
            "tpot_p50_ms": tpot.p50,
            "tpot_p95_ms": tpot.p95,
        }


async def drive(target: Target, options: Namespace, seed: int, url: str) -> Run:
    """Send the load and watch the roles meanwhile."""
    order = phases(options)
    loads, sending = [], []
    for number, phase in enumerate(order):
        arrivals = []
        for arrival in poisson_arrivals(phase.rate, seed + number):
            if arrival >= options.phase_s:
                break
            arrivals.append(phase.begins_s + arrival)
        load = Load(
            target.client,
            target.workload(phase.input_len, phase.output_len, seed + number),
            num_requests=len(arrivals),
        )
        loads.append(load)
        sending.append(load.open_loop(arrivals))
    found = Run([], options.phases * options.phase_s, (options.slo_ttft_ms, options.slo_tpot_ms))
    watching = asyncio.create_task(watch(url, found.workers))
    await asyncio.gather(*sending)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    found.records = [load.records for load in loads]
    return found


async def watch(url: str, workers: list[tuple[float, int, int]]) -> None:
    """Note the number of ready workers of each role every `POLL_S` seconds, until it is cancelled."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with httpx.AsyncClient(base_url=url, timeout=10.0, trust_env=False) as client:
        while True:
            ready = [one["role"] for one in (await client.get("/load")).json()["workers"] if one["state"] == "ready"]
            workers.append((loop.time() - began, ready.count("prefill"), ready.count("decode")))
            await asyncio.sleep(POLL_S)


def measure(split: Split, options: Namespace, seed: int) -> Run:
    """Start the split's cluster, let its workers learn how long their steps take, and measure it."""
    with split.stack(options) as stack, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        target = Target.of(stack.url)
        for phase in phases(options)[:2]:
            length, answer = max(1, phase.input_len // 2), max(2, phase.output_len // 4)
            warmup = Load(target.client, target.workload(length, answer, seed + 1000), num_requests=8)
            runner.run(warmup.closed_loop(4))
        began_at = time.time()
        measured = runner.run(drive(target, options, seed, stack.url))
        runner.run(target.client.close())
        measured.changes = role_changes(stack.log_dir, began_at)
    return measured


def as_json(one: Run) -> dict[str, Any]:
    """A run's numbers as JSON values."""
    return {**one.row(), "workers": one.workers, "changes": first_work.as_json(one.changes)}


def medians(runs: Sequence[Run]) -> dict[str, float]:
    """The median of each number of `Run.row` over the runs."""
    rows = [one.row() for one in runs]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0] if name != "met_by_phase"}


def plot(path: Path, results: dict[str, list[Run]], options: Namespace) -> None:
    """Draw the share of requests within goals over time, by split, and below it the workers whose roles change."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for name, runs in results.items():
        above.plot(*met_over_time(runs[0], options.phase_s / 6), label=name, linewidth=2 if name == "changing" else 1)
    above.set(ylabel="share within both goals", ylim=(-0.02, 1.05))
    _shade(above, options)
    above.legend(fontsize=8)
    changing = results.get("changing")
    if changing:
        times = [at for at, _, _ in changing[0].workers]
        for number, role in enumerate(ROLES, start=1):
            below.step(times, [one[number] for one in changing[0].workers], where="post", label=f"{role} workers")
    below.set(xlabel="seconds", ylabel="ready workers (changing)")
    _shade(below, options)
    below.legend(fontsize=8)
    save(figure, path, f"goals of {options.slo_ttft_ms:g} and {options.slo_tpot_ms:g} ms, four paced workers")


def met_over_time(measured: Run, window_s: float) -> tuple[list[float], list[float]]:
    """The share of the requests sent in each window that met both goals; windows without requests are left out."""
    records = [record for phase in measured.records for record in phase]
    first = min(record.start for record in records)
    windows: dict[int, list[bool]] = {}
    for record in records:
        windows.setdefault(int((record.start - first) / window_s), []).append(record.meets(*measured.goals_ms))
    ordered = sorted(windows.items())
    return [(number + 0.5) * window_s for number, _ in ordered], [statistics.fmean(met) for _, met in ordered]


def _shade(axes: Axes, options: Namespace) -> None:
    """Long answers on grey."""
    for phase in phases(options)[1::2]:
        axes.axvspan(phase.begins_s, phase.begins_s + options.phase_s, color="#888888", alpha=0.15, linewidth=0)
    axes.grid(alpha=0.2)


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, (__doc__ or "").partition("\n")[0], plot=True)
    parser.add_argument("--coefficients", type=Path, default=COEFFICIENTS, help="the workers' pace")
    parser.add_argument("--phases", type=int, default=4, help="how many phases, the first one of long prompts")
    parser.add_argument("--phase-s", type=float, default=60.0, help="seconds of each")
    parser.add_argument("--prompt-len", type=int, default=4000, help="long prompts, in tokens")
    parser.add_argument("--short-output-len", type=int, default=32, help="their answers")
    parser.add_argument("--prompt-rate", type=float, default=2.8, help="such requests a second")
    parser.add_argument("--short-input-len", type=int, default=100, help="the prompts of long answers, in tokens")
    parser.add_argument("--answer-len", type=int, default=200, help="long answers")
    parser.add_argument("--answer-rate", type=float, default=3.6, help="such requests a second")
    parser.add_argument("--slo-ttft-ms", type=float, default=4000.0, help="goal for the first token")
    parser.add_argument("--slo-tpot-ms", type=float, default=70.0, help="goal for each later token")
    parser.add_argument("--after-s", type=float, default=2.0, help="--role-change-after-s")
    parser.add_argument("--interval-s", type=float, default=5.0, help="--role-change-interval-s")
    parser.add_argument("--rounds", type=int, default=1, help="times that all splits are run, one after the other")
    parser.add_argument("--splits", default="", help="only splits whose name contains this")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals and prompts")
    parser.add_argument("--log-dir", type=Path, help="keep the processes' logs here")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options, console = parse(argv), open_console()
    splits = [split for split in SPLITS if options.splits in split.name]
    results: dict[str, list[Run]] = {split.name: [] for split in splits}
    for number in range(options.rounds):
        for split in in_turns(splits, number):
            console.print(f"round {number + 1} of {options.rounds}: {split.name}", highlight=False)
            results[split.name].append(measure(split, options, options.seed + 100 * number))
    rows = {name: medians(runs) for name, runs in results.items()}
    columns = ("", "goodput /s", "met", "refused", "failed", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95")
    shown = [
        (
            name,
            f"{row['goodput']:.2f}",
            f"{row['met']:.1%}",
            *(f"{row[key]:,.0f}" for key in ("refused", "failed")),
            *(f"{row[key]:,.1f}" for key in ("ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms", "tpot_p95_ms")),
        )
        for name, row in rows.items()
    ]
    print_table(console, "an alternating load, ms", columns, shown)
    fixed = max((row["goodput"] for name, row in rows.items() if name != "changing"), default=math.nan)
    if "changing" in rows and fixed > 0:
        console.print(f"changing roles: {rows['changing']['goodput'] / fixed:.2f} times the best fixed split")
    changes = [change for one in results.get("changing", ()) for change in one.changes]
    first_work.show(console, changes)
    runs = {name: [as_json(one) for one in found] for name, found in results.items()}
    content = {"rows": rows, "runs": runs, "first_work": first_work.summarised(changes)}
    write_result(options, PROGRAM, argv, content, settings=settings_of(options))
    if options.plot:
        plot(options.plot, results, options)
    return 0


if __name__ == "__main__":
    run(main)

"""Does `diptych plan` pick what a sweep of real clusters finds? Every number of workers within the bounds is started.

    python -m benchmarks.sweep benchmarks/data/sweep-prompts.toml benchmarks/data/sweep-answers.toml

Each file is a plan (docs/plan.md). Its search picks a candidate in virtual time; then each candidate is started as a
cluster of paced workers (`paced.py`) whose model waits as long as the plan's coefficients say, with real processes,
sockets and schedulers, and gets the requests of the plan's first seed at their times. The best of the sweep is
the cheapest cluster that met the goals; of clusters that cost as much, the one with the most goodput. Nothing else
should use the machine's cores meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop
from rich.console import Console

from benchmarks.arms import Target
from benchmarks.load.input_file import read_table
from benchmarks.load.load import Load
from benchmarks.load.report import open_console, print_table
from benchmarks.load.summary import OK, Distribution, RequestRecord
from benchmarks.load.trace import TraceRow
from benchmarks.load.workload import LengthRange, Workload
from benchmarks.paced.model import Coefficients
from benchmarks.paced.stack import PacedStack
from benchmarks.plan.candidate import Candidate, every, scenario
from benchmarks.plan.evidence import Evidence
from benchmarks.plan.outlook import Outlook
from benchmarks.plan.search import Search
from benchmarks.plan.spec import PlanSpec, spec_of
from benchmarks.plan.stretch import Stretch
from benchmarks.plan.trials import Trials
from benchmarks.script import run, script_parser, settings_of, write_result
from benchmarks.simulator.world.load import requests_of
from benchmarks.stack import StackSettings
from common.errors import ConfigError

PROGRAM: Final = "python -m benchmarks.sweep"
MARK: Final = 0.05
"""By how much more than the best of the sweep a pick may cost, or its goodput be less at that cost."""
WARM_UP_EACH, WARM_UP_AT_ONCE = 8, 4
"""Requests for each worker before anything is measured, so that its model of its steps is settled."""
ONE: Final = LengthRange(1, 1)
"""In place of lengths where rows name them."""


@dataclass(frozen=True, slots=True)
class Swept:
    """A candidate on real processes: shares of all requests, requests a second, and milliseconds of those served."""

    candidate: Candidate
    cost: float
    attainment: float
    goodput: float
    refused: float
    failed: float
    ttft_ms: Distribution
    tpot_ms: Distribution
    load_average: float

    @classmethod
    def of(cls, candidate: Candidate, spec: PlanSpec, records: Sequence[RequestRecord], seconds: float) -> Swept:
        """The requests of `seconds` of arrivals."""
        num, goals = len(records), spec.goals
        num_good = sum(record.meets(goals.ttft_ms, goals.tpot_ms) for record in records)
        refused = sum(record.outcome == "http 429" for record in records)
        served = [record for record in records if record.outcome == OK]
        return cls(
            candidate,
            candidate.cost(spec),
            num_good / num,
            num_good / seconds,
            refused / num,
            (num - refused - len(served)) / num,
            Distribution.of_seconds(record.ttft_s for record in served),
            Distribution.of_seconds(record.tpot_s for record in served),
            os.getloadavg()[0],
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The pick as it fared on real processes, beside the best of the sweep. None: no candidate met the goals.

    A pick that misses them on real processes is wrong, however little it costs.
    """

    pick: Swept | None
    best: Swept | None
    quantile: float

    @property
    def cost_ratio(self) -> float:
        """What the pick costs beside the best: 1 where both are none."""
        if self.pick is None or self.best is None:
            return 1.0 if self.pick is self.best else float("inf")
        return self.pick.cost / self.best.cost

    @property
    def goodput_ratio(self) -> float:
        if self.pick is None or self.best is None:
            return 1.0 if self.pick is self.best else 0.0
        return self.pick.goodput / self.best.goodput

    @property
    def is_within_mark(self) -> bool:
        meets = self.pick is None or self.pick.attainment >= self.quantile
        return meets and self.cost_ratio <= 1 + MARK and self.goodput_ratio >= 1 - MARK


def judge(swept: Sequence[Swept], pick: Candidate | None, quantile: float) -> Verdict:
    """Find the pick and the best in a sweep."""
    met = [one for one in swept if one.attainment >= quantile]
    best = min(met, key=lambda one: (one.cost, -one.goodput), default=None)
    return Verdict(next((one for one in swept if one.candidate == pick), None), best, quantile)


def planned(spec: PlanSpec, jobs: int) -> tuple[Evidence | None, dict[Candidate, Evidence]]:
    """The pick of the search; then all candidates in virtual time, of which it simulated some."""
    with Trials(spec, jobs=jobs) as trials:
        search = Search(trials, Outlook(spec))
        pick = search.best()
        search.exhaustive()
        return pick, {one.candidate: one for one in trials.all_evidence()}


def spec_at(path: Path) -> PlanSpec:
    """The plan of a file. Raises ConfigError, also for what clusters of a sweep do not have, and TraceError."""
    spec = Stretch.of(spec_of(read_table(path, "plan"))).spec
    if spec.routers != 1:
        raise ConfigError("routers", spec.routers, "1 in a sweep")
    if spec.load.copies != 1:
        raise ConfigError("load.copies", spec.load.copies, "1 in a sweep")
    if spec.settings:
        raise ConfigError("settings", ", ".join(spec.settings), "empty in a sweep")
    return spec


def stack_of(spec: PlanSpec, candidate: Candidate, pace: Path, log_dir: Path | None) -> PacedStack:
    """The candidate as processes, with the flags of the plan."""
    flags, goals = candidate.flags, spec.goals
    slo = ("--slo-ttft-ms", f"{goals.ttft_ms:g}", "--slo-tpot-ms", f"{goals.tpot_ms:g}")
    blocks = ("--block-size", str(spec.model.block_size), "--num-blocks")
    return PacedStack(
        StackSettings(
            candidate.num_prefill,
            candidate.num_decode,
            prefill_flags=(
                *(*blocks, str(spec.prefill.num_blocks)),
                *("--max-num-batched-tokens", str(flags.max_num_batched_tokens)),
            ),
            decode_flags=(
                *(*blocks, str(spec.decode.num_blocks), "--max-draft-tokens", "0", *slo[2:]),
                *("--max-num-seqs", str(flags.max_num_seqs), "--local-prefill-chunk", str(flags.local_prefill_chunk)),
            ),
            router_flags=(*slo, "--local-prefill-threshold", str(flags.local_prefill_threshold)),
            log_dir=log_dir,
        ),
        coefficients=pace,
        max_model_len=spec.model.max_model_len,
    )


def measure(spec: PlanSpec, candidate: Candidate, pace: Path, log_dir: Path | None) -> Swept:
    """Start the candidate, let its workers learn how long their steps take, and send the plan's load."""
    rows, id_tokens = rows_of(spec, candidate)
    num_workers = candidate.num_prefill + candidate.num_decode
    num_first = min(len(rows), WARM_UP_EACH * num_workers)
    stack = stack_of(spec, candidate, pace, log_dir)
    with stack, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        target = Target.of(stack.url)
        warm_up = Load(target.client, _workload(target, rows, id_tokens, spec.seed + 1000), num_requests=num_first)
        runner.run(warm_up.closed_loop(WARM_UP_AT_ONCE * num_workers))
        load = Load(target.client, _workload(target, rows, id_tokens, spec.seed), num_requests=len(rows))
        runner.run(load.open_loop([row.arrival_s for row in rows]))
        runner.run(target.client.close())
    return Swept.of(candidate, spec, load.records, spec.arrivals_s or max(1.0, rows[-1].arrival_s))


def _workload(target: Target, rows: Sequence[TraceRow], id_tokens: int, seed: int) -> Workload:
    return Workload(target.vocabulary, ONE, ONE, seed=seed, rows=rows, block_tokens=id_tokens)


def rows_of(spec: PlanSpec, candidate: Candidate) -> tuple[list[TraceRow], int]:
    """The requests that simulations of the plan's first seed get, and the tokens of one of their block ids."""
    requests = requests_of(scenario(spec, candidate, spec.seed, load_factor=1.0, goals=spec.goals))
    found = [(one.arrival_s, one.content.num_prompt_tokens, one.output_len, one.content.ids) for one in requests]
    return [TraceRow(*one) for one in found], requests[0].content.id_tokens


def sweep(path: Path, options: Namespace, console: Console) -> dict[str, Any]:
    """Plan, run every candidate, print both side by side. Raises ConfigError, StackError."""
    spec = spec_at(path)
    pick, simulated = planned(spec, options.jobs)
    found: list[Swept] = []
    with tempfile.TemporaryDirectory(prefix="diptych-sweep-") as folder:
        pace = Path(folder) / "pace.json"
        kinds = (spec.prefill.coefficients, spec.decode.coefficients)
        pace.write_bytes(msgspec.json.encode(Coefficients(*kinds, kv_bytes=spec.model.kv_bytes_per_token)))
        for number, candidate in enumerate(every(spec)):
            logs = (
                options.log_dir / path.stem / f"{number}-{candidate.shape.replace(' ', '-')}"
                if options.log_dir
                else None
            )
            found.append(measure(spec, candidate, pace, logs))
            console.print(f"{path.stem}: {candidate.shape}, {found[-1].attainment:.1%} met the goals", highlight=False)
    verdict = judge(found, pick.candidate if pick else None, spec.goals.quantile)
    show(console, path.stem, found, simulated, verdict)
    return {
        "plan": path.name,
        "candidates": [
            {"pools": one.candidate.shape, "simulated": simulated[one.candidate].attainment, "real": asdict(one)}
            for one in found
        ],
        "pick": verdict.pick.candidate.shape if verdict.pick else None,
        "best": verdict.best.candidate.shape if verdict.best else None,
        "cost_ratio": verdict.cost_ratio,
        "goodput_ratio": verdict.goodput_ratio,
        "is_within_mark": verdict.is_within_mark,
    }


def show(
    console: Console, title: str, found: Sequence[Swept], simulated: dict[Candidate, Evidence], verdict: Verdict
) -> None:
    columns = ("pools", "cost/h", "met", "simulated", "goodput /s", "refused", "failed", "TTFT p50/p95", "TPOT p50/p95")
    rows = [
        (
            (">" if one is verdict.pick else "") + ("*" if one is verdict.best else "") + f" {one.candidate.shape}",
            f"{one.cost:g}",
            f"{one.attainment:.1%}",
            f"{simulated[one.candidate].attainment:.1%}",
            f"{one.goodput:.2f}",
            f"{one.refused:.1%}",
            f"{one.failed:.1%}",
            f"{one.ttft_ms.p50:,.0f} / {one.ttft_ms.p95:,.0f}",
            f"{one.tpot_ms.p50:,.1f} / {one.tpot_ms.p95:,.1f}",
        )
        for one in found
    ]
    print_table(console, f"{title}: > the plan's pick, * the best of the sweep, ms", columns, rows)
    ratios = f"costs {verdict.cost_ratio:.2f} times the best and has {verdict.goodput_ratio:.2f} times its goodput"
    console.print(f"{title}: the pick {ratios}", highlight=False)


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, (__doc__ or "").partition("\n")[0])
    parser.add_argument("plans", nargs="+", type=Path, metavar="FILE", help="plans, as `diptych plan` takes them")
    parser.add_argument("--jobs", type=int, default=1, help="simulations side by side")
    parser.add_argument("--log-dir", type=Path, help="keep the processes' logs here")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Exit status 0, whether the plans are right or not."""
    options, console = parse(argv), open_console()
    results = [sweep(path, options, console) for path in options.plans]
    settings = {name: value for name, value in settings_of(options).items() if name != "plans"}
    write_result(options, PROGRAM, argv, {"plans": results}, settings=settings)
    return 0


if __name__ == "__main__":
    run(main)

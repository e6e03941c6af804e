"""Goodput against rate by policy, in the simulator: Diptych's beside plain rules, and beside one pool.

Each load is offered at shares of the rate that its pools can serve. All policies get the same requests of one repeat
before the next repeat begins with another seed and another slice of its trace.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.coefficients import StepCoefficients
from benchmarks.plot import save
from benchmarks.report import print_table
from benchmarks.simulator.report import Findings
from benchmarks.simulator.scenario import Scenario, scenario_of
from benchmarks.simulator.simulation import Simulation
from benchmarks.sla.step import Numbers, Settings, Step
from benchmarks.trace import TraceRow, read_trace
from common.latency.step_model import StepShape

OURS, ONE_POOL = "diptych", "one pool"
RIVALS: Final = ("random", "round-robin", "least-loaded", "prefix-only")
ARMS: Final = (OURS, *RIVALS, ONE_POOL)
SHARES: Final = (0.8, 1.0, 1.25)
"""Of the rate that the pools can serve."""
NUM_WORKERS: Final = 3
"""Of each role; one pool has twice as many decode workers."""
MARK, LEAST = 1.3, 0.97
BLOCK_TOKENS, NUM_BLOCKS, STEP_TOKENS, MOST_ROWS = 16, 25_000, 2048, 128
PREFILL: Final = StepCoefficients(fixed_s=4e-3, floor_s=8e-3, token_s=4e-5, pair_s=1.5e-9)
DECODE: Final = StepCoefficients(fixed_s=4e-3, floor_s=8e-3, token_s=4e-5, pair_s=1.5e-9, row_s=3e-5, context_s=2.5e-8)
"""About those of an 8B model on one large GPU, as in `benchmarks.planner`."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to slice, and goals in milliseconds. A prompt has at most `most_prompt` tokens."""

    name: str
    rows: Sequence[TraceRow]
    ttft_ms: float = 500.0
    tpot_ms: float = 25.0
    most_prompt: int = 30_000

    def slice(self, number: int, num_requests: int) -> Sequence[TraceRow]:
        """So many requests; numbers name slices that do not overlap while the load is long enough."""
        begin = number * num_requests % max(1, len(self.rows) - num_requests)
        rows = self.rows[begin : begin + num_requests]
        return [
            TraceRow(
                row.arrival_s - rows[0].arrival_s,
                min(row.input_len, self.most_prompt),
                max(1, row.output_len),
                row.block_ids[: self.most_prompt // 512],
            )
            for row in rows
        ]


def log_normal(
    name: str, seed: int, prompt: tuple[float, float], output: tuple[float, float], num: int = 6000, **goals: float
) -> Load:
    """Independent requests, one a second on average; medians and sigmas of their lengths."""
    chance, at = random.Random(f"{seed}/{name}"), 0.0
    rows: list[TraceRow] = []
    for _ in range(num):
        at += chance.expovariate(1.0)
        lengths = (round(median * chance.lognormvariate(0.0, sigma)) for median, sigma in (prompt, output))
        num_prompt, num_output = lengths
        rows.append(TraceRow(at, min(8000, max(16, num_prompt)), min(1500, max(4, num_output))))
    return Load(name, rows, **goals)  # type: ignore[arg-type]


def conversations(seed: int, num: int = 3000) -> Load:
    """Turns of conversations, each of which repeats the ones before it: blocks of 512 tokens as in Mooncake's trace."""
    chance, at, next_block = random.Random(f"{seed}/turns"), 0.0, 0
    rows: list[TraceRow] = []
    open_ones: list[tuple[int, ...]] = []
    while len(rows) < num:
        at += chance.expovariate(1.0)
        known: tuple[int, ...] = ()
        if open_ones and chance.random() < 0.7:
            known = open_ones.pop(chance.randrange(len(open_ones)))
        added = chance.randint(1, 6)
        blocks = (*known, *range(next_block, next_block + added))
        next_block += added
        rows.append(TraceRow(at, 512 * len(blocks), min(800, max(8, round(chance.lognormvariate(5.0, 0.6)))), blocks))
        open_ones = [*open_ones, blocks][-60:] if len(blocks) < 40 else open_ones
    return Load("conversations, synthetic", rows, ttft_ms=2500.0, tpot_ms=40.0)


def loads(settings: Settings) -> Iterator[Load]:
    """Raises TraceError for a file that cannot be read."""
    seed = settings.seed
    if settings.traces is None:
        yield log_normal("conversation, synthetic", seed, (900, 0.8), (180, 0.6))
        yield log_normal("code, synthetic", seed, (1600, 0.7), (25, 0.8))
        yield conversations(seed)
    else:
        yield Load("Azure conversation", read_trace(settings.traces / "azure2023_conv.csv.gz"))
        yield Load("Azure code", read_trace(settings.traces / "azure2023_code.csv.gz"))
        mooncake = read_trace(settings.traces / "mooncake_conversation.jsonl.gz")
        yield Load("Mooncake", mooncake, ttft_ms=5000.0, tpot_ms=40.0)
    yield log_normal("short prompts, long answers", seed, (120, 0.5), (500, 0.4), ttft_ms=300.0)


def rate_served(rows: Sequence[TraceRow], load: Load) -> float:
    """Requests a second that the pools can serve about: prompts without hits, and rows within the goal for a token."""
    model = PREFILL.model()
    prompt_s = statistics.fmean(model.steps_s(StepShape.of_prompt(0, row.input_len), STEP_TOKENS) for row in rows)
    context = statistics.fmean(row.input_len + row.output_len / 2 for row in rows)
    in_step = (load.tpot_ms / 1000 - DECODE.fixed_s - DECODE.floor_s) / (DECODE.row_s + DECODE.context_s * context)
    num_rows = min(MOST_ROWS, in_step, NUM_BLOCKS * BLOCK_TOKENS / context)
    answer_s = load.tpot_ms / 1000 * statistics.fmean(row.output_len for row in rows)
    return NUM_WORKERS * min(1 / prompt_s, num_rows / answer_s)


def scenario(load: Load, trace: Path, arm: str, speedup: float, seed: int) -> Scenario:
    pool = {"num_blocks": NUM_BLOCKS, "max_num_seqs": MOST_ROWS}
    num_prefill, num_decode = (0, 2 * NUM_WORKERS) if arm == ONE_POOL else (NUM_WORKERS, NUM_WORKERS)
    prefill, decode = (msgspec.to_builtins(each) for each in (PREFILL, DECODE))
    return scenario_of(
        {
            "seed": seed,
            "policy": OURS if arm == ONE_POOL else arm,
            "goals": {"ttft_ms": load.ttft_ms, "tpot_ms": load.tpot_ms},
            "load": {"trace": str(trace), "speedup": speedup, "jitter_s": 3.0 / speedup},
            "pool": [
                {"name": "p", "role": "prefill", "count": num_prefill, "coefficients": prefill}
                | pool
                | {"max_step_tokens": STEP_TOKENS},
                {"name": "d", "role": "decode", "count": num_decode, "coefficients": decode} | pool,
            ],
        }
    )


def measure(settings: Settings, tell: Callable[[str], None]) -> Numbers:
    runs: list[dict[str, Any]] = []
    began = time.process_time()
    with tempfile.TemporaryDirectory(prefix="diptych-sla-") as folder:
        for load in loads(settings):
            for repeat in range(settings.repeats):
                tell(f"{load.name}, repeat {repeat + 1} of {settings.repeats}")
                part = partial(_of_slice, load, repeat, settings, Path(folder) / "slice.jsonl")
                runs += settings.journal.once(f"{load.name}, {repeat}", part)
    return {"runs": runs, "summary": summarised(runs), "cpu_s": round(time.process_time() - began)}


def _of_slice(load: Load, repeat: int, settings: Settings, file: Path) -> list[dict[str, Any]]:
    """Every policy at every rate, with the same requests."""
    rows = load.slice(repeat, settings.num_requests)
    write_trace(file, rows)
    served, natural = rate_served(rows, load), (len(rows) - 1) / max(1e-9, rows[-1].arrival_s)
    runs = []
    for share in SHARES:
        for arm in ARMS:
            found = Findings.of(Simulation(scenario(load, file, arm, share * served / natural, repeat)).run())
            run = {
                "load": load.name,
                "policy": arm,
                "repeat": repeat,
                "share": share,
                "rate": round(share * served, 3),
                "goodput": round(found.num_good / (rows[-1].arrival_s * natural / (share * served)), 3),
                "met": round(found.num_good / found.num_requests, 4),
                "refused": found.num_refused,
                "failed": found.num_failed,
                "ttft_p95_ms": round(found.ttft_ms.p95, 1),
                "tpot_p95_ms": round(found.tpot_ms.p95, 2),
                "cached": round(found.cached_share, 3),
                "worker_s": round(found.worker_seconds, 1),
            }
            runs.append(run)
    return runs


def write_trace(file: Path, rows: Sequence[TraceRow]) -> None:
    """Write requests in Mooncake's format."""
    lines = (
        {
            "timestamp": row.arrival_s * 1000,
            "input_length": row.input_len,
            "output_length": row.output_len,
            "hash_ids": row.block_ids,
        }
        for row in rows
    )
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n")


def summarised(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By load and share of the rate: medians over repeats, and the median of each repeat's ratio to its best rival."""
    rows = []
    for load in dict.fromkeys(run["load"] for run in runs):
        for share in dict.fromkeys(run["share"] for run in runs):
            here = [run for run in runs if (run["load"], run["share"]) == (load, share)]
            repeats = dict.fromkeys(run["repeat"] for run in here)
            by = {(run["policy"], run["repeat"]): run["goodput"] for run in here}
            best = [max(by[rival, repeat] for rival in RIVALS) for repeat in repeats]
            ratios = [by[OURS, repeat] / max(1e-9, most) for repeat, most in zip(repeats, best, strict=True)]
            to_one = [by[OURS, repeat] / max(1e-9, by[ONE_POOL, repeat]) for repeat in repeats]
            rows.append(
                {
                    "load": load,
                    "share": share,
                    "rate": round(statistics.median(run["rate"] for run in here), 2),
                    "goodput": {arm: statistics.median(by[arm, repeat] for repeat in repeats) for arm in ARMS},
                    "to_best_rival": round(statistics.median(ratios), 3),
                    "to_best_rival_range": [round(min(ratios), 3), round(max(ratios), 3)],
                    "to_one_pool": round(statistics.median(to_one), 3),
                }
            )
    return rows


def show(console: Console, numbers: Mapping[str, Any]) -> None:
    columns = ("load", "of capacity", "rate /s", *ARMS, "to best rival", "range", "to one pool")
    rows = [
        (
            row["load"],
            f"{row['share']:.0%}",
            f"{row['rate']:.1f}",
            *(f"{row['goodput'][arm]:.2f}" for arm in ARMS),
            f"{row['to_best_rival']:.2f}",
            "{:.2f}-{:.2f}".format(*row["to_best_rival_range"]),
            f"{row['to_one_pool']:.2f}",
        )
        for row in numbers["summary"]
    ]
    print_table(console, "goodput, requests/s within goals", columns, rows)
    ratios = [row["to_best_rival"] for row in numbers["summary"]]
    reached = sum(ratio >= MARK for ratio in ratios)
    below = sum(row[name] < LEAST for row in numbers["summary"] for name in ("to_best_rival", "to_one_pool"))
    told = f"at least {MARK} times the best rival in {reached} of {len(ratios)} cases; below {LEAST} in {below}"
    console.print(told, highlight=False)


def draw(numbers: Mapping[str, Any], path: Path, title: str) -> None:
    names = list(dict.fromkeys(row["load"] for row in numbers["summary"]))
    figure = Figure(figsize=(5 * len(names), 4.5), layout="constrained")
    for index, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), index + 1)
        rows = [row for row in numbers["summary"] if row["load"] == name]
        rates = [row["rate"] for row in rows]
        for arm in ARMS:
            width = 2.5 if arm == OURS else 1.2
            axes.plot(rates, [row["goodput"][arm] for row in rows], "o-", markersize=4, label=arm, linewidth=width)
        axes.plot(rates, rates, color="#999999", linestyle=":", linewidth=1, label="all")
        axes.set(title=name, xlabel="requests/s", ylabel="goodput, requests/s", ylim=(0, None))
        axes.grid(alpha=0.2)
        axes.legend(loc="upper left", fontsize=7)
    save(figure, path, title)


STEP: Final = Step("policies", "goodput against rate by policy, in virtual time", measure, show, draw)

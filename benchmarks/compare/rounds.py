"""Rounds of a comparison: each engine started, measured under every load and ended, in turning order."""

from __future__ import annotations

import asyncio
import gc
import math
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop
from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.compare.engines import Engine
from benchmarks.compare.peer import NUM_PORTS, PeerError
from benchmarks.compare.ratios import Cell, Load
from benchmarks.compare.running import RunningEngine
from benchmarks.load import load as driver
from benchmarks.load.client import PROBE_TEXT, CompletionClient, RequestOptions, ServerError, ask_server
from benchmarks.load.summary import Summary, summarise
from benchmarks.load.workload import WORDS, LengthRange, Vocabulary, Workload, poisson_arrivals
from benchmarks.script import in_turns
from benchmarks.stack import free_port
from common.model_files.files import ModelFiles

WARMUP_INDEX = 10**6
WARMUP_OUTPUT_LEN = 8
CONTEXT_STEP = 256


@dataclass(frozen=True)
class Run:
    """One start of an engine: its seconds, and the memory of all its processes after the last load."""

    start_s: float
    memory_mib: float


def token_ids(files: ModelFiles) -> tuple[int, ...]:
    """Ids of ordinary text, from the model's own tokenizer, so that every engine gets the same prompts."""
    tokenizer = Tokenizer.from_file(str(files.tokenizer))
    return tuple(sorted(set(tokenizer.encode(PROBE_TEXT, add_special_tokens=False).ids)))


def num_requests(load: Load, options: Namespace) -> int:
    """Closed loops: `per_user` times the concurrency, at least `min_requests`. Time bounds open loops."""
    return 0 if load.rate else max(options.min_requests, options.per_user * load.concurrency)


async def run_load(client: CompletionClient, workload: Workload, load: Load, options: Namespace, seed: int) -> Summary:
    """Warm up with short answers to prompts of the load's length, then run the load."""
    num_short = min(WARMUP_OUTPUT_LEN, load.output_len)
    short = LengthRange(num_short, num_short)
    warm = Workload(workload.vocabulary, workload.input_len, short, seed=seed)
    users = load.concurrency or 1
    await driver.Load(client, warm, num_requests=max(2, users), first_index=WARMUP_INDEX).closed_loop(users)
    seconds = options.open_loop_s if load.rate else options.max_s
    driven = driver.Load(client, workload, num_requests=num_requests(load, options), duration_s=seconds)
    gc.collect()
    if load.rate:
        await driven.open_loop(poisson_arrivals(load.rate, seed))
    else:
        await driven.closed_loop(load.concurrency)
    return summarise(driven.records, slo_ttft_ms=options.slo_ttft_ms, slo_tpot_ms=options.slo_tpot_ms)


def measure(
    engine: Engine,
    loads: Sequence[Load],
    ids: tuple[int, ...],
    options: Namespace,
    seed: int,
    log_dir: Path,
    done: Callable[[Load, Summary], None],
) -> Run:
    """Start the engine and pass each load's summary to `done`. Raises PeerError and ServerError."""
    launch = engine.launch([free_port() for _ in range(NUM_PORTS)])
    vocabulary = Vocabulary(words=WORDS) if launch.text_only else Vocabulary(ids)
    with (
        RunningEngine(launch, log_dir, options.ready_timeout_s) as running,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        model = launch.model
        if not model:
            with httpx.Client(base_url=launch.url, timeout=30.0, trust_env=False) as asking:
                model = ask_server(asking, "").model
        # Each request has a new connection: some servers drop idle ones, and all should pay the same.
        request = RequestOptions(model, ignore_eos=not launch.text_only, timeout_s=options.request_timeout_s)
        client = CompletionClient(launch.url, request, keep_alive=False)
        try:
            for number, load in enumerate(loads):
                of_load = seed + number
                lengths = LengthRange(load.input_len, load.input_len), LengthRange(load.output_len, load.output_len)
                workload = Workload(vocabulary, *lengths, seed=of_load)
                done(load, runner.run(running.during(run_load(client, workload, load, options, of_load))))
        finally:
            runner.run(client.close())
        return Run(running.start_s, running.memory_bytes() / 2**20)


def compare(
    engines: Sequence[Engine], loads: Sequence[Load], ids: tuple[int, ...], options: Namespace, console: Console
) -> tuple[dict[str, dict[Load, Cell]], dict[str, list[Run | str]]]:
    """Cells by engine and load; and by engine each start, or the reason of its failure."""
    results = {engine.name: {load: Cell() for load in loads} for engine in engines}
    runs: dict[str, list[Run | str]] = {engine.name: [] for engine in engines}
    with ExitStack() as stack:
        logs = options.log_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="diptych-compare-")))
        for number in range(options.repeats):
            for engine in in_turns(engines, number):
                console.print(f"round {number + 1} of {options.repeats}: {engine.name}", highlight=False)
                folder = logs / f"{number}-{engine.name.replace(':', '-')}"

                def done(load: Load, summary: Summary, name: str = engine.name) -> None:
                    console.print(f"  {load}: {summary.output_tokens_per_s:,.1f} output tok/s", highlight=False)
                    results[name][load].add(load, summary)

                try:
                    run = measure(engine, loads, ids, options, options.seed + 1000 * number, folder, done)
                except (PeerError, ServerError) as error:
                    console.print(f"{engine.name} failed: {error}", highlight=False, markup=False, style="red")
                    runs[engine.name].append(str(error))
                    continue
                runs[engine.name].append(run)
    return results, runs


def bounds(loads: Sequence[Load]) -> tuple[int, int]:
    """The longest sequence, in steps of CONTEXT_STEP, and the most sequences that every engine is to take."""
    longest = max(load.input_len + load.output_len for load in loads)
    context = math.ceil((longest + 1) / CONTEXT_STEP) * CONTEXT_STEP
    return context, max(32, *(load.concurrency for load in loads))


def describe_runs(runs: Sequence[Run | str]) -> dict[str, Any]:
    """Seconds of each start, or the reason of its failure, and MiB, as JSON values."""
    started = [run for run in runs if isinstance(run, Run)]
    return {
        "start_s": [round(run.start_s, 1) if isinstance(run, Run) else run for run in runs],
        "memory_mib": [round(run.memory_mib, 1) for run in started],
    }


def add_options(parser: ArgumentParser, *, repeats: int, per_user: int, least: int) -> None:
    """The options of rounds, with these defaults."""
    parser.add_argument(
        "--per-user", type=int, default=per_user, help="requests of a closed loop per concurrent request"
    )
    parser.add_argument("--min-requests", type=int, default=least, help="minimum number of requests of a closed loop")
    parser.add_argument(
        "--max-s", type=float, default=120.0, help="time after which a closed loop sends no more requests, in seconds"
    )
    parser.add_argument(
        "--repeats", type=int, default=repeats, help="number of measurements per engine, each after a restart"
    )
    parser.add_argument("--slo-ttft-ms", type=float, default=0.0, help="goal for the TTFT in ms, 0 for none")
    parser.add_argument("--slo-tpot-ms", type=float, default=0.0, help="goal for the TPOT in ms, 0 for none")
    parser.add_argument("--seed", type=int, default=1, help="random seed of the prompts and arrivals")
    parser.add_argument(
        "--ready-timeout-s", type=float, default=600.0, help="maximum start time of an engine, in seconds"
    )
    parser.add_argument("--request-timeout-s", type=float, default=900.0, help="maximum time for a request, in seconds")
    parser.add_argument("--log-dir", type=Path, help="folder for the logs of the engines")

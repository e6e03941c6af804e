"""`diptych bench`: loads an OpenAI-compatible server and measures the latencies of its clients."""

from __future__ import annotations

import asyncio
import gc
import math
import secrets
import signal
import ssl
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.load.client import (
    CompletionClient,
    RequestOptions,
    Server,
    ServerError,
    ask_server,
    ask_token_ids,
    auth_headers,
)
from benchmarks.load.conditions import conditions
from benchmarks.load.config import DEFAULT_CONCURRENCY, DEFAULT_NUM_REQUESTS, BenchConfig
from benchmarks.load.load import Load
from benchmarks.load.probing import FoundRate, Goals, Probe, Prober
from benchmarks.load.report import check_writable, open_console, print_summary, result, write_json
from benchmarks.load.server_report import print_rate, print_server, probe_line, rate_result, server_result
from benchmarks.load.summary import RequestRecord, Summary, summarise
from benchmarks.load.trace import MOONCAKE_BLOCK_TOKENS, TraceError, read_trace
from benchmarks.load.watch import ServerWatch
from benchmarks.load.workload import (
    LengthRange,
    Vocabulary,
    Workload,
    fit_rows,
    poisson_arrivals,
    trace_arrivals,
)
from common.config.sources import exit_refused, load
from common.errors import ConfigError

PROG = "diptych bench"
WARMUP_INDEX = 10**9  # far from the indexes of measured requests
EXIT_ALL_FAILED, EXIT_INTERRUPTED = 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, 1 when every request failed, 2 for refused settings, 130 when interrupted."""
    argv = sys.argv[1:] if argv is None else list(argv)
    config = load(BenchConfig, argv, prog=PROG)
    if config.seed < 0:
        config = replace(config, seed=secrets.randbelow(2**31))
    console = open_console()
    try:
        check_writable(output=config.output, plot=config.plot)
        with httpx.Client(
            base_url=config.url,
            headers=auth_headers(config.api_key),
            timeout=10.0,
            trust_env=False,
            verify=ssl.create_default_context(),  # as the load does: SSL_CERT_FILE may name other authorities
        ) as asking:
            server = ask_server(asking, config.model)
            token_ids = () if config.sends_text else ask_token_ids(asking, server.model, config.vocab_size)
        workload = build_workload(config, token_ids)
    except (ConfigError, ServerError, TraceError) as error:
        exit_refused(error, PROG, vars(config))
    if config.find_rate:
        found, interrupted = find_rate(config, server, workload, console)
        deliver_rate(config, server, found, console, argv)
        ended = 0 if found.rate else EXIT_ALL_FAILED
    else:
        watch = ServerWatch(config.url, config.api_key)
        records, interrupted = measure(config, server, workload, watch, console)
        summary = summarise(records, slo_ttft_ms=config.slo_ttft_ms, slo_tpot_ms=config.slo_tpot_ms)
        if interrupted:
            console.print("interrupted; measured so far:")
        deliver(config, server, records, summary, watch, console, argv)
        ended = 0 if summary.num_ok else EXIT_ALL_FAILED
    return EXIT_INTERRUPTED if interrupted else ended


def build_workload(config: BenchConfig, token_ids: tuple[int, ...]) -> Workload:
    """Raises TraceError."""
    rows = fit_rows(
        read_trace(Path(config.trace), config.num_requests) if config.trace else [],
        scale=config.trace_scale,
        max_input_len=config.max_input_len,
        max_output_len=config.max_output_len,
    )
    return Workload(
        Vocabulary(token_ids),
        LengthRange.parse(config.input_len),
        LengthRange.parse(config.output_len),
        seed=config.seed,
        shared_prefix_len=config.shared_prefix_len,
        rows=rows,
        block_tokens=max(1, round(MOONCAKE_BLOCK_TOKENS * config.trace_scale)),
    )


def num_requests(config: BenchConfig, workload: Workload) -> int:
    """Most requests to send; 0: until the rates or `duration_s` are over."""
    if config.num_requests or config.profile or (config.duration_s and not config.replays_arrivals):
        return config.num_requests
    return len(workload.rows) or DEFAULT_NUM_REQUESTS


def measure(
    config: BenchConfig, server: Server, workload: Workload, watch: ServerWatch, console: Console
) -> tuple[list[RequestRecord], bool]:
    """Every request's record, and whether the run was interrupted (SIGINT or SIGTERM)."""
    total = num_requests(config, workload)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console, refresh_per_second=4, disable=not config.progress) as progress,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        bar = progress.add_task(server.model, total=total or None)
        client = _client(config, server)
        warmup = Load(client, workload, num_requests=config.warmup, first_index=WARMUP_INDEX)
        run = Load(
            client,
            workload,
            num_requests=total,
            duration_s=config.duration_s,
            on_done=lambda record: progress.update(bar, advance=1),
        )
        gc.collect()
        gc.freeze()  # the collector skips existing objects while tokens are timed
        interrupted = runner.run(_until_interrupted(_drive(config, workload, warmup, run, watch)))
        runner.run(client.close())
    return run.records, interrupted


def _client(config: BenchConfig, server: Server) -> CompletionClient:
    options = RequestOptions(
        server.model, config.endpoint == "chat", config.ignore_eos, config.temperature, config.timeout_s
    )
    return CompletionClient(config.url, options, api_key=config.api_key, keep_alive=config.keep_alive)


async def _drive(config: BenchConfig, workload: Workload, warmup: Load, run: Load, watch: ServerWatch) -> None:
    if config.warmup:
        await warmup.closed_loop(1)
    async with watch.during():
        if (profile := config.profile) is not None:
            await run.open_loop(profile.arrivals(config.seed))
        elif config.rate:
            await run.open_loop(poisson_arrivals(float(config.rate), config.seed))
        elif config.replays_arrivals:
            await run.open_loop(
                trace_arrivals(workload.rows, speedup=config.speedup, jitter_s=config.jitter_s, seed=config.seed)
            )
        else:
            await run.closed_loop(config.concurrency or DEFAULT_CONCURRENCY)


def find_rate(config: BenchConfig, server: Server, workload: Workload, console: Console) -> tuple[FoundRate, bool]:
    """The highest rate within goals, and whether the search was interrupted: then it is the highest found so far."""
    found: list[FoundRate] = []

    def show(probe: Probe) -> None:
        if config.progress:
            console.print(probe_line(probe), highlight=False, markup=False)

    async def search() -> None:
        if config.warmup:
            await Load(client, workload, num_requests=config.warmup, first_index=WARMUP_INDEX).closed_loop(1)
        found.append(await prober.find(float(config.rate or 0.0), config.rate_tolerance))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        client = _client(config, server)
        prober = Prober(
            client,
            workload,
            Goals(config.slo_ttft_ms, config.slo_tpot_ms, config.slo_quantile),
            least=config.num_requests or DEFAULT_NUM_REQUESTS,
            seed=config.seed,
            most_trial_s=config.duration_s,
            on_probe=show,
        )
        interrupted = runner.run(_until_interrupted(search()))
        runner.run(client.close())
    return found[0] if found else FoundRate.so_far(prober.probes), interrupted


async def _until_interrupted(work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` to its end or until a signal; True after a signal."""
    task = asyncio.ensure_future(work)
    loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return True
    finally:
        for number in numbers:  # uvloop leaves them installed when it is closed: later signals would do nothing
            loop.remove_signal_handler(number)
    return False


def deliver(
    config: BenchConfig,
    server: Server,
    records: Sequence[RequestRecord],
    summary: Summary,
    watch: ServerWatch,
    console: Console,
    argv: Sequence[str],
) -> None:
    """Print the table and write the requested files."""
    title = f"{server.model} at {config.url}: {describe(config)}"
    print_summary(console, summary, title=title, slo=_goals_in_words(config))
    cost = watch.cost(config.prices)
    print_server(console, cost, watch.errors, watch.drafts, num_tokens=summary.output_tokens)
    if config.output:
        content = result(summary, records, *_settings(config, server, argv))
        content |= server_result(watch, cost, num_tokens=summary.output_tokens)
        write_json(Path(config.output), content)
        console.print(f"wrote {config.output}", highlight=False)
    if config.plot:
        from benchmarks.load.plot import plot_run  # matplotlib takes a second to import

        plot_run(Path(config.plot), records, title=title, goals_ms=(config.slo_ttft_ms, config.slo_tpot_ms))
        console.print(f"wrote {config.plot}", highlight=False)


def deliver_rate(config: BenchConfig, server: Server, found: FoundRate, console: Console, argv: Sequence[str]) -> None:
    """Print the trials and the answer, and write the requested files."""
    title = f"{server.model} at {config.url}: {describe(config)}"
    print_rate(console, found, title=title, goals=_goals_in_words(config), quantile=config.slo_quantile)
    if config.output:
        found_in, settings = _settings(config, server, argv)
        write_json(Path(config.output), {"conditions": found_in, "settings": settings, **rate_result(found)})
        console.print(f"wrote {config.output}", highlight=False)
    if config.plot:
        from benchmarks.load.plot import plot_rate

        plot_rate(Path(config.plot), found, quantile=config.slo_quantile, title=title)
        console.print(f"wrote {config.plot}", highlight=False)


def _goals_in_words(config: BenchConfig) -> str:
    bounds = (("TTFT", config.slo_ttft_ms), ("TPOT", config.slo_tpot_ms))
    return " and ".join(f"{name} {bound:g} ms" for name, bound in bounds if bound)


def _settings(config: BenchConfig, server: Server, argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Conditions and settings of a run, as its JSON file has them."""
    found = conditions(PROG, argv, url=config.url, model=server.model, server_version=server.version)
    return found | {"seed": config.seed}, {name: value for name, value in asdict(config).items() if name != "api_key"}


def describe(config: BenchConfig) -> str:
    """A short description of the load."""
    lengths = f"{config.input_len} in, {config.output_len} out"
    if config.trace:
        lengths = f"lengths of {Path(config.trace).name}"
    if config.replays_arrivals:
        return f"{lengths}, its arrivals {config.speedup:g}x"
    if config.find_rate:
        return f"{lengths}, the highest rate within goals"
    if config.profile:
        return f"{lengths}, {config.rates or config.ramp or config.burst} requests/s"
    if config.rate:
        return f"{lengths}, {'all at once' if math.isinf(float(config.rate)) else config.rate + ' requests/s'}"
    return f"{lengths}, {config.concurrency or DEFAULT_CONCURRENCY} in flight"


if __name__ == "__main__":
    raise SystemExit(main())

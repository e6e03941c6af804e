"""Diptych beside its peers: one engine at a time, the same machine, model, client and requests; ratios of one run.

Every second round reverses the order of the engines, and medians are compared. Prompts are random tokens of exact
length, the same ones for every engine; outputs are greedy and of full length; prefix caches are off. A run in which an
engine failed a request or returned other lengths is reported and not counted.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import math
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop
from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.compare.diptych import DiptychVariant
from benchmarks.compare.llama_cpp import LlamaCpp
from benchmarks.compare.openvino import OpenVino
from benchmarks.compare.peer import NUM_PORTS, Launch, Peer, PeerError, Site
from benchmarks.compare.picture import plot, print_rows
from benchmarks.compare.ratios import Cell, Load, parse_loads, rows
from benchmarks.compare.running import RunningEngine
from benchmarks.compare.transformers import Transformers
from benchmarks.compare.vllm import Vllm, Vllm1P1D
from benchmarks.load import load as driver
from benchmarks.load.client import PROBE_TEXT, CompletionClient, RequestOptions, ServerError, ask_server
from benchmarks.load.report import open_console
from benchmarks.load.summary import Summary, summarise
from benchmarks.load.workload import WORDS, LengthRange, Vocabulary, Workload, poisson_arrivals
from benchmarks.script import in_turns, run, script_parser, settings_of, write_result
from benchmarks.stack import free_port
from common.errors import ModelError
from common.model_files.cache_folder import cache_folder
from common.model_files.files import ModelFiles
from common.model_files.resolve import resolve_model

PROGRAM = "python -m benchmarks.compare"
PEERS: dict[str, Peer] = {peer.name: peer for peer in (Vllm(), Vllm1P1D(), OpenVino(), LlamaCpp(), Transformers())}
DEFAULT_VARIANT = "bf16=--dtype bfloat16 --quantization none"
WARMUP_INDEX = 10**6
WARMUP_OUTPUT_LEN = 8
CONTEXT_STEP = 256


@dataclass(frozen=True)
class Engine:
    """A variant of Diptych or of a peer: how to launch it on given ports, and its settings for the reader."""

    name: str
    launch: Callable[[Sequence[int]], Launch]
    about: dict[str, Any]


def own_engines(options: Namespace, files: ModelFiles, context: int, most: int) -> list[Engine]:
    """One engine for each named variant of Diptych. Raises ValueError."""
    variants = [DiptychVariant.parse(text, options.diptych_args) for text in options.diptych or [DEFAULT_VARIANT]]
    return [
        Engine(
            f"diptych:{variant.name}",
            functools.partial(variant.launch, options.model, context, most),
            {"flags": list(variant.flags), "environment": dict(variant.env), "model_id": files.model_id},
        )
        for variant in variants
    ]


def peer_engines(options: Namespace, files: ModelFiles, context: int, most: int) -> list[Engine]:
    """One engine for each `--peer`; writes the model in the formats they need. Raises ValueError and PeerError."""
    wanted = [(name, *choose_variant(name)) for name in options.peer]
    environments = peer_environments(options.peer_env, [peer for _, peer, _ in wanted])
    versions = {peer.name: peer.version(environments[peer.name]) for _, peer, _ in wanted}
    from benchmarks.compare.weights import convert  # torch takes seconds to import

    weights = convert(files, [peer.variants[variant] for _, peer, variant in wanted])
    cores = tuple(sorted(os.sched_getaffinity(0)))
    engines = []
    for _, peer, variant in wanted:
        site = Site(environments[peer.name], weights, cores, context, most)
        about = {"version": versions[peer.name], "format": peer.variants[variant]}
        engines.append(Engine(f"{peer.name}:{variant}", functools.partial(peer.launch, variant, site), about))
    return engines


def choose_variant(text: str) -> tuple[Peer, str]:
    """`vllm` (its first variant) or `vllm:int8`. Raises ValueError."""
    name, _, variant = text.partition(":")
    if name not in PEERS:
        raise ValueError(f"no peer {name!r}; known are {', '.join(PEERS)}")
    peer = PEERS[name]
    variant = variant or next(iter(peer.variants))
    if variant not in peer.variants:
        raise ValueError(f"{name} has no variant {variant!r}; it has {', '.join(peer.variants)}")
    return peer, variant


def peer_environments(given: Sequence[str], peers: Sequence[Peer]) -> dict[str, Path]:
    """The folder of each peer: `NAME=FOLDER`, a bare folder for the only peer, else a folder of the cache."""
    names = list(dict.fromkeys(peer.name for peer in peers))
    found = {name: cache_folder() / "peers" / "environments" / name for name in names}
    for text in given:
        name, equals, folder = text.partition("=")
        if not equals and len(names) == 1:
            name, folder = names[0], text
        if name not in found or not folder:
            raise ValueError(f"{text!r} is not NAME=FOLDER with NAME one of {', '.join(names)}")
        found[name] = Path(folder).absolute()
    return found


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
    return summarise(driven.records)


def measure(
    engine: Engine,
    loads: Sequence[Load],
    ids: tuple[int, ...],
    options: Namespace,
    seed: int,
    log_dir: Path,
    done: Callable[[Load, Summary], None],
) -> float:
    """Pass each load's summary to `done`; returns the seconds of the start. Raises PeerError and ServerError."""
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
    return running.start_s


def compare(
    engines: Sequence[Engine], loads: Sequence[Load], ids: tuple[int, ...], options: Namespace, console: Console
) -> tuple[dict[str, dict[Load, Cell]], dict[str, list[Any]]]:
    """Cells by engine and load; and by engine the seconds of each start, or the reason of its failure."""
    results = {engine.name: {load: Cell() for load in loads} for engine in engines}
    starts: dict[str, list[Any]] = {engine.name: [] for engine in engines}
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
                    start_s = measure(engine, loads, ids, options, options.seed + 1000 * number, folder, done)
                except (PeerError, ServerError) as error:
                    console.print(f"{engine.name} failed: {error}", highlight=False, markup=False, style="red")
                    starts[engine.name].append(str(error))
                    continue
                starts[engine.name].append(round(start_s, 1))
    return results, starts


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, __doc__, model="model to serve, from a GGUF file", plot=True)
    several: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--prepare", nargs=2, metavar=("PEER", "DIR"), help="install PEER into DIR and do no more")
    parser.add_argument("--peer", **several, metavar="NAME[:VARIANT]", help=f"a peer to measure: {_known()}")
    parser.add_argument("--peer-env", **several, metavar="[NAME=]DIR", help="where --prepare installed a peer")
    parser.add_argument(
        "--diptych",
        **several,
        metavar="NAME=ARGS",
        help=f"a variant: [VARIABLE=value] serve's flags ({DEFAULT_VARIANT})",
    )
    parser.add_argument("--diptych-args", default="", metavar="ARGS", help="more flags for every variant")
    parser.add_argument("--workload", default="128/128", help="tokens in/out, separated by commas")
    parser.add_argument("--concurrency", default="1,8,32", help="requests in flight, separated by commas")
    parser.add_argument(
        "--open-loop", default="", metavar="IN/OUT@RATE", help="also this load at RATE requests a second"
    )
    parser.add_argument("--open-loop-s", type=float, default=120.0, help="seconds of arrivals of an open loop")
    parser.add_argument("--per-user", type=int, default=3, help="requests of a closed loop, times its concurrency")
    parser.add_argument("--min-requests", type=int, default=6, help="least requests of a closed loop")
    parser.add_argument("--max-s", type=float, default=120.0, help="seconds after which a closed loop starts no more")
    parser.add_argument("--repeats", type=int, default=3, help="times that every engine is started and measured")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts and arrivals")
    parser.add_argument("--ready-timeout-s", type=float, default=600.0, help="seconds an engine may take to start")
    parser.add_argument("--request-timeout-s", type=float, default=900.0, help="seconds a request may take")
    parser.add_argument("--log-dir", type=Path, help="keep the engines' logs here")
    return parser.parse_args(argv)


def _known() -> str:
    return "; ".join(f"{peer.name} ({', '.join(peer.variants)})" for peer in PEERS.values())


def main(argv: Sequence[str]) -> int:
    """Exit status 0, 1 when an engine failed or a run did not count, 2 for refused settings."""
    options, console = parse(argv), open_console()
    try:
        if options.prepare:
            choose_variant(options.prepare[0])[0].prepare(Path(options.prepare[1]).absolute())
            return 0
        loads = parse_loads(options.workload, options.concurrency, options.open_loop)
        longest = max(load.input_len + load.output_len for load in loads)
        context = math.ceil((longest + 1) / CONTEXT_STEP) * CONTEXT_STEP
        most = max(32, *(load.concurrency for load in loads))
        files = resolve_model(options.model)
        own = own_engines(options, files, context, most)
        engines = [*own, *peer_engines(options, files, context, most)]
    except (ValueError, PeerError, ModelError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    results, starts = compare(engines, loads, token_ids(files), options, console)
    names = [engine.name for engine in own]
    table = rows(results, names, [engine.name for engine in engines[len(own) :]])
    about = {engine.name: {**engine.about, "start_s": starts[engine.name]} for engine in engines}
    print_rows(console, table)
    write_result(options, PROGRAM, argv, {"engines": about, "rows": table}, settings=settings_of(options))
    if options.plot:
        rounds = "one round" if options.repeats == 1 else f"medians of {options.repeats} rounds"
        plot(options.plot, table, names, f"{options.model}, {rounds}, {os.cpu_count()} cores")
    cells = [cell for by_load in results.values() for cell in by_load.values()]
    return int(any(cell.problems or not cell.medians() for cell in cells))


if __name__ == "__main__":
    run(main)

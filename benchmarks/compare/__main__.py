"""Diptych beside its peers: one engine at a time, the same machine, model, client and requests; ratios of one run.

Every second round reverses the order of the engines, and medians are compared. Prompts are random tokens of exact
length, the same ones for every engine; outputs are greedy and of full length; prefix caches are off. A run in which an
engine failed a request or returned other lengths is reported and not counted.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.engines import (
    DEFAULT_VARIANT,
    PEERS,
    choose_variant,
    own_engines,
    peer_engines,
    peer_environments,
)
from benchmarks.compare.peer import PeerError
from benchmarks.compare.picture import plot, print_rows
from benchmarks.compare.ratios import parse_loads, rows
from benchmarks.compare.rounds import add_options, bounds, compare, describe_runs, token_ids
from benchmarks.load.report import open_console
from benchmarks.script import run, script_parser, settings_of, write_result
from common.errors import ModelError
from common.model_files.resolve import resolve_model

PROGRAM = "python -m benchmarks.compare"


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, __doc__, model="model to serve, from a GGUF file", plot=True)
    several: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--prepare", nargs=2, metavar=("PEER", "DIR"), help="only install PEER into DIR")
    parser.add_argument("--peer", **several, metavar="NAME[:VARIANT]", help=f"peer to measure: {_known()}")
    parser.add_argument("--peer-env", **several, metavar="[NAME=]DIR", help="folder of --prepare for a peer")
    parser.add_argument(
        "--diptych",
        **several,
        metavar="NAME=ARGS",
        help=f"variant: environment variables and flags of serve (default {DEFAULT_VARIANT})",
    )
    parser.add_argument("--diptych-args", default="", metavar="ARGS", help="additional flags for all variants")
    parser.add_argument("--workload", default="128/128", help="prompt/output lengths in tokens, separated by commas")
    parser.add_argument("--concurrency", default="1,8,32", help="numbers of concurrent requests, separated by commas")
    parser.add_argument(
        "--open-loop", default="", metavar="IN/OUT@RATE", help="additional open loop at RATE requests per second"
    )
    parser.add_argument("--open-loop-s", type=float, default=120.0, help="duration of an open loop in seconds")
    add_options(parser, repeats=3, per_user=3, least=6)
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
        context, most = bounds(loads)
        files = resolve_model(options.model)
        environments = peer_environments(options.peer_env, [choose_variant(name)[0] for name in options.peer])
        own = own_engines(options, files, context, most)
        engines = [*own, *peer_engines(options.peer, environments, files, context, most)]
    except (ValueError, PeerError, ModelError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    results, runs = compare(engines, loads, token_ids(files), options, console)
    names = [engine.name for engine in engines if engine.is_own]
    table = rows(results, names, [engine.name for engine in engines if not engine.is_own])
    about = {engine.name: {**engine.about, **describe_runs(runs[engine.name])} for engine in engines}
    print_rows(console, table)
    write_result(options, PROGRAM, argv, {"engines": about, "rows": table}, settings=settings_of(options))
    if options.plot:
        rounds = "one round" if options.repeats == 1 else f"medians of {options.repeats} rounds"
        plot(options.plot, table, names, f"{options.model}, {rounds}, {os.cpu_count()} cores")
    cells = [cell for by_load in results.values() for cell in by_load.values()]
    return int(any(cell.problems or not cell.medians() for cell in cells))


if __name__ == "__main__":
    run(main)

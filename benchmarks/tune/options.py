"""The command line of `diptych tune`."""

from __future__ import annotations

import argparse
from pathlib import Path

from common.arguments import CommandParser, number
from common.model_files import DEFAULT_MODEL
from router.cli.client_flags import add_api_key

PROG = "diptych tune"
ABOUT = """\
Find the settings that meet latency goals best for a load, on a fixed number of workers.
The command measures a service, simulates other settings with its step times, measures the best two of them on
workers that it starts, and writes a configuration file. With --url it only measures the service as it is.
"""
EXAMPLES = """\
examples:
  diptych tune --ttft 300 --tpot 30 --rate 4 --input-len 200-1500 --output-len 20-80
  diptych tune Qwen/Qwen3-0.6B --ttft 500 --tpot 50 --load azure2023_conv.csv.gz --speedup 0.2 --minutes 20
  diptych tune --url http://127.0.0.1:8000 --ttft 300 --tpot 30 --rate 8
"""
LENGTH = "N[-M]"
MILLISECONDS = number(above=0, high=3.6e6)
SEED = number(0, 2**31, whole=True)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `diptych tune`."""
    parser = CommandParser(
        PROG, description=ABOUT, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=f"model to serve (default {DEFAULT_MODEL})"
    )
    _add_goals(parser.add_argument_group("goals"))
    _add_load(parser.add_argument_group("load"))
    _add_service(parser.add_argument_group("service"))
    group = parser.add_argument_group("results")
    group.add_argument(
        "--output",
        type=Path,
        default=Path("tuned.toml"),
        metavar="FILE",
        help="configuration file for diptych serve --config (default tuned.toml)",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="JSON file for all results")
    group.add_argument("--no-progress", action="store_true", help="do not show a progress bar")
    return parser


def _add_goals(group: argparse._ArgumentGroup) -> None:
    for flag, goal in (("--ttft", "TTFT"), ("--tpot", "TPOT")):
        help_text = f"goal for the {goal}, in milliseconds"
        group.add_argument(flag, type=MILLISECONDS, required=True, metavar="MS", help=help_text)
    group.add_argument(
        "--quantile",
        type=number(0.5, 0.999),
        default=0.95,
        metavar="X",
        help="fraction of requests that should meet both goals (default 0.95)",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--load", default="", metavar="FILE", help="trace to replay: Azure CSV or Mooncake JSON lines")
    group.add_argument(
        "--speedup",
        type=number(above=0, high=1e9),
        default=1.0,
        metavar="X",
        help="replay speed of the trace (default 1)",
    )
    group.add_argument(
        "--rate",
        type=number(above=0, high=1e6),
        metavar="X",
        help="rate of Poisson arrivals in requests per second (default: 0.7 of what four concurrent clients reach)",
    )
    group.add_argument("--input-len", default="512", metavar=LENGTH, help="prompt length in tokens (default 512)")
    group.add_argument("--output-len", default="64", metavar=LENGTH, help="output length in tokens (default 64)")
    group.add_argument("--seed", type=SEED, default=1, metavar="N", help="random seed (default 1)")


def _add_service(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--url", default="", metavar="URL", help="URL of a running router (default: start workers here)")
    add_api_key(group)
    group.add_argument(
        "--workers",
        type=number(1, 16, whole=True),
        default=2,
        metavar="N",
        help="number of workers to start, divided between the roles in different ways (default 2)",
    )
    group.add_argument("--dtype", default="auto", metavar="TYPE", help="--dtype of the workers (default auto)")
    group.add_argument(
        "--quantization", default="auto", metavar="FORMAT", help="--quantization of the workers (default auto)"
    )
    group.add_argument(
        "--kv-memory-gib",
        type=number(above=0, high=1e6),
        default=1.0,
        metavar="X",
        help="--kv-memory-gib of each worker, in GiB (default 1)",
    )
    group.add_argument(
        "--minutes", type=number(1, 1440), default=10.0, metavar="X", help="time limit in minutes (default 10)"
    )

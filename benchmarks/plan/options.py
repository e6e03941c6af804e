"""The command line of `diptych plan`, and the input that it makes of a file and flags."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.load.input_file import read_table
from benchmarks.plan.spec import merged
from common.arguments import CommandParser, number
from common.errors import ConfigError, UsageError
from router.cli.client_flags import add_api_key

PROG = "diptych plan"
ABOUT = """\
Find the cheapest numbers of prefill and decode workers and the flags that meet latency goals for a load.
Candidates are simulated with the code of the router and the workers in virtual time.
Flags take precedence over the file. Step times come from the file, --coefficients, --from or --profile.
"""
EXAMPLES = """\
examples:
  diptych plan plan.toml --values values.yaml
  diptych plan --coefficients paced.json --rate 8 --input-len 200-3000 --output-len 50-300 \\
      --slo-ttft-ms 500 --slo-tpot-ms 30 --price-prefill 2.5 --price-decode 2.5
  diptych plan --from http://127.0.0.1:8000 --trace mooncake.jsonl.gz --speedup 0.5 --duration-s 600 --slo-ttft-ms 2000
  diptych plan --profile smollm2-135m --rate 2 --slo-ttft-ms 800 --slo-tpot-ms 60

The command does not deploy anything. See docs/guides/plan.md.
"""
FIELDS = {
    "trace": ("load", "trace"),
    "speedup": ("load", "speedup"),
    "jitter_s": ("load", "jitter_s"),
    "rate": ("load", "rate"),
    "input_len": ("load", "input_len"),
    "output_len": ("load", "output_len"),
    "shared_prefix_len": ("load", "shared_prefix_len"),
    "duration_s": ("duration_s",),
    "slo_ttft_ms": ("goals", "ttft_ms"),
    "slo_tpot_ms": ("goals", "tpot_ms"),
    "slo_quantile": ("goals", "quantile"),
    "price_prefill": ("prefill", "price"),
    "price_decode": ("decode", "price"),
    "max_prefill": ("prefill", "most"),
    "max_decode": ("decode", "most"),
    "max_workers": ("bounds", "max_workers"),
    "max_cost": ("bounds", "max_cost"),
    "seeds": ("search", "seeds"),
    "seed": ("seed",),
    "kv_bytes": ("model", "kv_bytes_per_token"),
}
"""Flags, by the place in the file that they stand for."""
LISTS = ("local_prefill_threshold", "max_num_batched_tokens", "max_num_seqs", "local_prefill_chunk")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `diptych plan`."""
    parser = CommandParser(
        PROG, description=ABOUT, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "plan", type=Path, nargs="?", help="TOML or JSON file with the load, goals, workers, prices and limits"
    )
    _add_load(parser.add_argument_group("load"))
    _add_goals(parser.add_argument_group("goals, prices and bounds"))
    _add_workers(parser.add_argument_group("workers"))
    _add_search(parser.add_argument_group("search"))
    _add_results(parser.add_argument_group("results"))
    return parser


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--trace", metavar="FILE", help="trace to replay: Azure CSV or Mooncake JSON lines")
    group.add_argument("--speedup", type=float, metavar="X", help="replay speed of the trace (default 1)")
    group.add_argument(
        "--jitter-s", type=float, metavar="X", help="maximum delay of each arrival of the trace, in seconds (default 0)"
    )
    group.add_argument("--rate", type=float, metavar="X", help="rate of Poisson arrivals in requests per second")
    group.add_argument("--input-len", metavar="N[-M]", help="prompt length in tokens (default 512)")
    group.add_argument("--output-len", metavar="N[-M]", help="output length in tokens (default 128)")
    group.add_argument(
        "--shared-prefix-len", type=int, metavar="N", help="tokens at the start that all prompts share (default 0)"
    )
    group.add_argument(
        "--duration-s",
        type=float,
        metavar="X",
        help="duration of the arrivals in seconds (default: 600 requests, or 1200 s of a trace)",
    )


def _add_goals(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--slo-ttft-ms", type=float, metavar="X", help="goal for the TTFT, in milliseconds")
    group.add_argument("--slo-tpot-ms", type=float, metavar="X", help="goal for the TPOT, in milliseconds")
    group.add_argument(
        "--slo-quantile", type=float, metavar="X", help="fraction of requests that should meet the goals (default 0.95)"
    )
    group.add_argument("--price-prefill", type=float, metavar="X", help="hourly price of a prefill worker (default 1)")
    group.add_argument("--price-decode", type=float, metavar="X", help="hourly price of a decode worker (default 1)")
    group.add_argument("--max-prefill", type=int, metavar="N", help="maximum number of prefill workers (default 64)")
    group.add_argument("--max-decode", type=int, metavar="N", help="maximum number of decode workers (default 64)")
    group.add_argument("--max-workers", type=int, metavar="N", help="maximum number of workers in total (default 16)")
    group.add_argument("--max-cost", type=float, metavar="X", help="maximum hourly cost (default: no limit)")


def _add_workers(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group()
    source.add_argument("--coefficients", type=Path, metavar="FILE", help="JSON file with prefill, decode and kv_bytes")
    source.add_argument("--from", dest="url", metavar="URL", help="URL of a running router whose workers to plan for")
    source.add_argument("--profile", metavar="MODEL", help="model to measure on this machine")
    add_api_key(group)
    group.add_argument(
        "--profile-s",
        type=number(1, 3600),
        default=120.0,
        metavar="X",
        help="duration of the measurement of --profile, in seconds (default 120)",
    )
    group.add_argument("--dtype", default="auto", metavar="TYPE", help="--dtype for --profile (default auto)")
    group.add_argument(
        "--quantization",
        default="auto",
        metavar="FORMAT",
        help="--quantization for --profile (default auto)",
    )
    group.add_argument(
        "--kv-memory-gib",
        type=float,
        default=1.0,
        metavar="X",
        help="--kv-memory-gib for --profile, in GiB (default 1)",
    )
    group.add_argument("--kv-bytes", type=int, metavar="N", help="bytes of KV per token (default 131072)")
    group.add_argument(
        "--link-rate", type=float, metavar="X", help="network bandwidth per worker in bytes per second (default 12.5e9)"
    )


def _add_search(group: argparse._ArgumentGroup) -> None:
    for name in LISTS:
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=_numbers, metavar="N[,N...]", help=f"values of {flag} to try")
    group.add_argument("--seeds", type=int, metavar="N", help="maximum number of simulations per candidate (default 5)")
    group.add_argument("--seed", type=int, metavar="N", help="random seed of the first simulation (default 1)")
    group.add_argument("--exhaustive", action="store_true", help="simulate every candidate instead of searching")
    group.add_argument(
        "--jobs",
        type=number(0, 1024, whole=True),
        default=0,
        metavar="N",
        help="number of processes (default: one per core)",
    )


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", type=Path, metavar="FILE", help="JSON file for all results")
    group.add_argument("--values", type=Path, metavar="FILE", help="YAML file for Helm values of the best candidate")
    group.add_argument(
        "--model", default="smollm2-135m", metavar="NAME", help="model in the Helm values (default smollm2-135m)"
    )
    group.add_argument("--plot", type=Path, metavar="FILE", help="PNG file for a plot of cost and attainment")
    group.add_argument("--no-progress", action="store_true", help="do not show a progress bar")


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: must be whole numbers such as 64,512") from error


def values_of(
    options: argparse.Namespace, measure: Callable[[argparse.Namespace], Mapping[str, Any]]
) -> dict[str, Any]:
    """The plan's input as one table, unchecked; `measure` profiles workers. Raises ConfigError."""
    values: dict[str, Any] = {}
    if options.coefficients:
        values = _coefficients(options.coefficients)
    elif options.url:
        from benchmarks.plan.running import ask_load, kinds_in  # imports httpx, which --help must not need

        values = kinds_in(ask_load(options.url, options.api_key), options.url)
    elif options.profile:
        values = dict(measure(options))
    if options.plan:
        file = read_table(options.plan, "plan")
        sourced: dict[str, Any] = {role: kind for role, kind in values.items() if role in ("prefill", "decode")}
        values = merged(merged(values, file), sourced if not options.coefficients else _only_steps(sourced))
    values = merged(values, _given(options))
    for role in ("prefill", "decode"):
        if not isinstance(values.get(role), Mapping) or "coefficients" not in values[role]:
            raise UsageError(
                f"{role}.coefficients",
                f"missing {role}.coefficients: set them in the file, or with --coefficients, --from or --profile",
            )
    values.setdefault("load", {})
    values.setdefault("goals", {})
    return with_prompts(values)


def _only_steps(kinds: Mapping[str, Any]) -> dict[str, Any]:
    return {role: {"coefficients": kind["coefficients"]} for role, kind in kinds.items()}


def _coefficients(path: Path) -> dict[str, Any]:
    """A file of coefficients for both roles, such as benchmarks/data/paced.json."""
    found = read_table(path, "plan")
    if unknown := set(found) - {"prefill", "decode", "kv_bytes"}:
        raise ConfigError("coefficients", str(path), f"a file with prefill, decode and kv_bytes, not {min(unknown)}")
    values: dict[str, Any] = {role: {"coefficients": found[role]} for role in ("prefill", "decode") if role in found}
    if "kv_bytes" in found:
        values["model"] = {"kv_bytes_per_token": found["kv_bytes"]}
    return values


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """What flags say, at the places of the file."""
    values: dict[str, Any] = {}
    for flag, path in FIELDS.items():
        value = getattr(options, flag)
        if value is not None:
            for key in reversed(path):
                value = {key: value}
            values = merged(values, value)
    if options.link_rate is not None:
        values = merged(values, {role: {"link_rate": options.link_rate} for role in ("prefill", "decode")})
    lists = {name: getattr(options, name) for name in LISTS if getattr(options, name) is not None}
    return merged(values, {"search": lists}) if lists else values


def with_prompts(values: dict[str, Any]) -> dict[str, Any]:
    """A kind of worker that was never seen to compute prompts computes them as the other one does.

    Otherwise prompts would take it no time, and one pool would always win.
    """
    kinds = {role: values[role]["coefficients"] for role in ("prefill", "decode")}
    for role, other in (("decode", "prefill"), ("prefill", "decode")):
        own, its = kinds[role], kinds[other]
        if isinstance(own, Mapping) and isinstance(its, Mapping) and not (own.get("token_s") or own.get("pair_s")):
            prompts = {name: its[name] for name in ("token_s", "pair_s") if name in its}
            values = merged(values, {role: {"coefficients": prompts}})
    return values


def num_jobs(options: argparse.Namespace) -> int:
    """Return the number of processes for simulations."""
    return int(options.jobs) or len(os.sched_getaffinity(0))

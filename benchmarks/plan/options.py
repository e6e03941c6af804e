"""The command line of `diptych plan`, and the input that it makes of a file and flags."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.load.input_file import read_table
from benchmarks.plan.running import ask_load, kinds_in
from benchmarks.plan.spec import merged
from common.errors import ConfigError

PROG = "diptych plan"
ABOUT = """\
Which numbers of prefill and decode workers, one pool or two, and which flags meet goals for a load at the least cost?
Candidates are simulated with the router's and the workers' own code in virtual time, on the same requests.
Flags win over the file; coefficients of steps come from it, or from one of --coefficients, --from and --profile.
"""
EXAMPLES = """\
examples:
  diptych plan plan.toml --values values.yaml
  diptych plan --coefficients paced.json --rate 8 --input-len 200-3000 --output-len 50-300 \\
      --slo-ttft-ms 500 --slo-tpot-ms 30 --price-prefill 2.5 --price-decode 2.5
  diptych plan --from http://127.0.0.1:8000 --trace mooncake.jsonl.gz --speedup 0.5 --duration-s 600 --slo-ttft-ms 2000
  diptych plan --profile smollm2-135m --rate 2 --slo-ttft-ms 800 --slo-tpot-ms 60

docs/guides/plan.md describes the file, the method and its limits. The command only plans: nothing is deployed.
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


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=PROG, description=ABOUT, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path, nargs="?", help="TOML or JSON file: load, goals, workers, prices, bounds")
    _add_load(parser.add_argument_group("load"))
    _add_goals(parser.add_argument_group("goals, prices and bounds"))
    _add_workers(parser.add_argument_group("workers"))
    _add_search(parser.add_argument_group("search"))
    _add_results(parser.add_argument_group("results"))
    return parser.parse_args(argv)


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--trace", metavar="FILE", help="replay this trace: Azure CSV or Mooncake JSON lines")
    group.add_argument("--speedup", type=float, help="replay it so many times as fast")
    group.add_argument("--jitter-s", type=float, help="move each of its arrivals by up to so many seconds")
    group.add_argument("--rate", type=float, help="requests a second, at random times, instead of a trace")
    group.add_argument("--input-len", metavar="N[-M]", help="tokens of a prompt (512)")
    group.add_argument("--output-len", metavar="N[-M]", help="tokens of an answer (128)")
    group.add_argument("--shared-prefix-len", type=int, help="leading tokens that all prompts share")
    group.add_argument(
        "--duration-s", type=float, help="requests arrive for so long; default: until 600 came, or of a trace 1,200"
    )


def _add_goals(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--slo-ttft-ms", type=float, help="goal for the first token")
    group.add_argument("--slo-tpot-ms", type=float, help="goal for each later token")
    group.add_argument("--slo-quantile", type=float, help="share of requests that should meet both (0.95)")
    group.add_argument("--price-prefill", type=float, help="price of a prefill worker's hour (1)")
    group.add_argument("--price-decode", type=float, help="price of a decode worker's hour (1)")
    group.add_argument("--max-prefill", type=int, help="most prefill workers (64)")
    group.add_argument("--max-decode", type=int, help="most decode workers (64)")
    group.add_argument("--max-workers", type=int, help="most workers together (16)")
    group.add_argument("--max-cost", type=float, help="most that an hour may cost; 0: no limit")


def _add_workers(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group()
    source.add_argument("--coefficients", type=Path, metavar="FILE", help="JSON with prefill, decode and kv_bytes")
    source.add_argument(
        "--from", dest="url", metavar="URL", help="coefficients and sizes of a running router's workers"
    )
    source.add_argument("--profile", metavar="MODEL", help="start a worker of each kind here and measure them")
    group.add_argument("--api-key", default="", help="for --from")
    group.add_argument("--profile-s", type=float, default=120.0, help="seconds of measuring, start not included (120)")
    group.add_argument("--dtype", default="auto", help="for --profile: as of the workers")
    group.add_argument("--quantization", default="none", help="for --profile: as of the workers")
    group.add_argument("--kv-memory-gib", type=float, default=1.0, help="for --profile: KV memory of a worker (1)")
    group.add_argument("--kv-bytes", type=int, help="bytes of a token's KV, which links carry (131072)")
    group.add_argument("--link-rate", type=float, help="bytes a second of each worker's link (12.5e9)")


def _add_search(group: argparse._ArgumentGroup) -> None:
    for name in LISTS:
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=_numbers, metavar="N[,N...]", help="values to try; the first with all pools")
    group.add_argument("--seeds", type=int, help="most runs of a candidate (5)")
    group.add_argument("--seed", type=int, help="of the first run (1): the same seed gives the same plan")
    group.add_argument("--exhaustive", action="store_true", help="simulate every candidate instead of a search")
    group.add_argument("--jobs", type=int, default=0, help="processes that simulate; 0: one for each core")


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", type=Path, metavar="FILE", help="write everything")
    group.add_argument("--values", type=Path, metavar="FILE", help="write Helm values for the pick")
    group.add_argument("--model", default="smollm2-135m", help="the model in the values: built-in name or hub id")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw cost against attainment as a PNG")
    group.add_argument("--no-progress", action="store_true", help="show no progress bar")


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 64,512") from error


def values_of(
    options: argparse.Namespace, measure: Callable[[argparse.Namespace], Mapping[str, Any]]
) -> dict[str, Any]:
    """The plan's input as one table, unchecked; `measure` profiles workers. Raises ConfigError."""
    values: dict[str, Any] = {}
    if options.coefficients:
        values = _coefficients(options.coefficients)
    elif options.url:
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
            raise ConfigError(f"{role}.coefficients", None, "in the file, or from --coefficients, --from or --profile")
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
    """How many processes simulate. Raises ConfigError."""
    if not 0 <= options.jobs <= 1024:
        raise ConfigError("jobs", options.jobs, "from 0 to 1024")
    return int(options.jobs) or len(os.sched_getaffinity(0))

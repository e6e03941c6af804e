"""How much the front door costs: the production router between stand-ins for workers and a lean load.

Stand-ins in one process speak the real wire and make tokens at will, without a model; clients in processes of their own
count what arrives by its bytes. So the router is what is measured, and its own CPU seconds (all its threads) are the
measure, which other work on the machine disturbs least. Beside it runs a plain Starlette application under uvicorn that
streams the same chunks. Each round measures every server anew, in turning order; medians are shown.

  streaming  tokens as fast as clients read them, from 1,000 streams: each token is an event of its own
  latency    from the stand-in's stamp to the client's receipt, at half of 30,000 tokens/s for each process, in steps
             of 1 to 250 streams, beside floors: the burst times the CPU time that the event loop took for a token, as
             often as bursts come (evenly spaced), and if they came at random
  short      whole answers of 4 tokens to chats of a hundred, 32 at once: prefill and decode worker take part
  large      prompts of 220 KB, 4 at once
  turns      conversations of 220 KB that go on with another question each time, 4 at once
  long       a prompt of 100,000 tokens beside 200 streams: its time, and how late tokens of the others become
  idle       10,000 streams that wait for a token: memory of each

A run fails unless every token that was made arrived. --tree FOLDER measures another version of the router as well,
--vllm PYTHON vLLM's API server, whose engine samples a token for each stream without a model, as fast as it can:
latency and idle streams are not measured there, and the engine's process does not count.
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks.load.conditions import version_of
from benchmarks.load.report import open_console, print_table
from benchmarks.router.arm import Arm, PlainArm, RouterArm
from benchmarks.router.figures import QUICK, WORDS, Bench, Figures, Lost, Size
from benchmarks.router.load import TOKEN
from benchmarks.router.vllm_arm import VllmArm
from benchmarks.script import in_turns, run, script_parser, write_result
from common.model_files.resolve import resolve_model
from common.model_files.tokenizer import Tokenizer

PROGRAM: Final = "python -m benchmarks.router"
PARTS: Final = ("streaming", "latency", "short", "large", "turns", "long", "idle")
PACKAGES: Final = ("uvicorn", "starlette", "httptools", "fastapi", "orjson", "msgspec")
OTHER_FILES: Final = 1000
"""Descriptors of the router and of a client for everything but streams."""
ROWS: Final = (
    ("tokens_per_cpu_s", "streamed tokens/s, a core of the server", 0, "30,000"),
    ("tokens_per_s", "streamed tokens/s, as the machine allowed", 0, ""),
    ("events_per_token", "events a token", 3, "1"),
    ("requests_per_cpu_s", "short requests/s, a core of the server", 0, "1,000"),
    ("requests_per_s", "short requests/s, as the machine allowed", 0, ""),
    ("request_p50_ms", "short request p50, ms", 1, ""),
    ("large_per_cpu_s", "220 KB prompts/s, a core of the server", 1, "130"),
    ("large_per_s", "220 KB prompts/s, as the machine allowed", 1, ""),
    ("turns_per_cpu_s", "220 KB conversations/s that go on, a core of the server", 1, "130"),
    ("turns_per_s", "220 KB conversations/s that go on, as the machine allowed", 1, ""),
    ("long_tokens", "long prompt: tokens", 0, ""),
    ("long_s", "long prompt: seconds", 2, ""),
    ("others_p99_before_ms", "streams before it: added latency p99, ms", 2, ""),
    ("others_p99_ms", "streams beside it: added latency p99, ms", 2, ""),
    ("others_worst_ms", "streams beside it: worst, ms", 2, ""),
    ("idle_streams", "idle streams", 0, ""),
    ("idle_kib", "memory of an idle stream, KiB", 1, ""),
    ("idle_share", "cores that idle streams use", 3, ""),
)
STEP_COLUMNS: Final = (
    ("at_tokens_per_s", "tokens/s", 0),
    ("cpu_share", "cores", 2),
    ("work_us", "event loop, us a token", 1),
    ("p50_ms", "p50, ms", 2),
    ("floor_p50_ms", "floor", 2),
    ("p99_ms", "p99, ms", 2),
    ("floor_p99_ms", "floor", 2),
    ("random_p99_ms", "floor at random", 2),
)
HALF_RATE: Final = 15_000.0
"""Tokens/s of latency for each process of a router: half of what one should stream."""


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, __doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="run a small load for a second or two, as a check")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds over all servers, in alternating order (default: 3)"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help="parts to run")
    parser.add_argument("--model", default="smollm2-135m", help="model of the tokenizer (default: smollm2-135m)")
    parser.add_argument("--prefill", type=int, default=1, help="simulated prefill workers (default: 1)")
    parser.add_argument("--decode", type=int, default=4, help="simulated decode workers (default: 4)")
    parser.add_argument("--clients", type=int, default=1, help="load processes (default: 1)")
    parser.add_argument("--seconds", type=float, help="duration of each rate, in seconds (default: 5)")
    parser.add_argument("--streams", type=int, help="streams of the parts streaming and latency (default: 1,000)")
    parser.add_argument("--idle", type=int, help="idle streams (default: 10,000)")
    parser.add_argument("--rate", type=float, help="tokens/s of the part latency (default: 15,000 per router process)")
    parser.add_argument("--steps", type=int, nargs="+", metavar="N", help="streams per step (default: 1 4 16 64 250)")
    parser.add_argument("--router-processes", type=int, default=1, help="router processes (default: 1)")
    parser.add_argument("--tree", type=Path, help="checkout whose router is measured too, alternately")
    parser.add_argument("--router-flags", default="", help="flags of the router, as one argument")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="Python with vLLM, to measure its front end too")
    parser.add_argument("--pin", action="store_true", help="pin each server process to its own core")
    parser.add_argument("--no-plain", action="store_true", help="do not measure the plain application")
    parser.add_argument("--log-dir", type=Path, help="folder for the logs of the router")
    options = parser.parse_args(argv)
    if options.pin and (options.vllm is not None or options.router_processes >= len(os.sched_getaffinity(0))):
        parser.error("--pin needs a core more than --router-processes, and is not for --vllm")
    return options


def pinned(num_processes: int) -> frozenset[int]:
    """The last cores, one for each process of the server. This process, and what it starts, keeps to the others."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:-num_processes])
    return frozenset(cores[-num_processes:])


def size_of(options: Namespace, console: Console) -> Size:
    """The size of the load, as far as open files allow."""
    size = QUICK if options.quick else Size()
    given = {name: value for name in ("seconds", "streams", "idle") if (value := getattr(options, name)) is not None}
    size = replace(size, **given)
    if options.steps:
        size = replace(size, steps=tuple(options.steps))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(size.idle, size.streams) + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = max(1, soft - OTHER_FILES)
        console.print(f"the hard limit of {hard:,} open files allows {most:,} streams, not {size.idle:,}")
        size = replace(size, idle=min(most, size.idle), streams=min(most, size.streams))
    return size


def arms_of(options: Namespace, log_dir: Path, size: Size, token_id: int) -> list[Callable[[], Arm]]:
    """What makes each server."""
    workers, flags = (options.prefill, options.decode), options.router_flags.split()
    Arm.cores = pinned(options.router_processes) if options.pin else frozenset()

    def router(name: str, tree: Path | None) -> Callable[[], Arm]:
        num = options.router_processes
        return lambda: RouterArm(
            *(name, options.clients, options.model, workers, token_id),
            tree=tree, num_processes=num, flags=flags, log_dir=log_dir,
        )  # fmt: skip

    arms = [router("router", None)]
    if options.tree is not None:
        arms.append(router(f"router of {options.tree.name}", options.tree.resolve()))
    if not options.no_plain:
        arms.append(lambda: PlainArm(options.clients, max(size.idle, size.streams)))
    if options.vllm is not None:
        files = resolve_model(options.model, weights=False)
        arms.append(lambda: VllmArm(options.clients, options.vllm.absolute(), files, token_id, log_dir))
    return arms


def measure(arm: Arm, size: Size, parts: Sequence[str], rate: float, chars_per_token: float) -> Figures:
    """The figures of one server; `rate` is that of latency."""
    bench, figures = Bench(arm, size, chars_per_token), Figures()
    if "short" in parts:
        figures |= bench.short()
    if "streaming" in parts:
        figures |= bench.streaming()
    if "latency" in parts and arm.paced:
        figures |= bench.latency(rate)
    if not isinstance(arm, PlainArm):
        if "large" in parts:
            figures |= bench.large()
        if "turns" in parts:
            figures |= bench.turns()
    if "long" in parts and isinstance(arm, RouterArm):
        figures |= bench.long()
    if "idle" in parts and arm.paced:
        figures |= bench.idle()
    return figures


def rounds_of(
    options: Namespace, size: Size, token_id: int, chars_per_token: float, console: Console
) -> dict[str, list[Figures]]:
    """The figures of every server, round by round."""
    found: dict[str, list[Figures]] = {}
    rate = options.rate or (size.beside_rate if options.quick else HALF_RATE * options.router_processes)
    with tempfile.TemporaryDirectory(prefix="diptych-front-") as temporary:
        log_dir = options.log_dir or Path(temporary)
        log_dir.mkdir(parents=True, exist_ok=True)
        makers = arms_of(options, log_dir, size, token_id)
        for number in range(options.rounds):
            for make in in_turns(makers, number):
                with make() as arm:
                    figures = measure(arm, size, options.only, rate, chars_per_token)
                found.setdefault(arm.name, []).append(figures)
                shown = ", ".join(f"{name} {value:,.3g}" for name, value in figures.items())
                console.print(f"round {number + 1}, {arm.name}: {shown}", highlight=False)
    return found


def medians(found: dict[str, list[Figures]]) -> dict[str, Figures]:
    return {
        arm: {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        for arm, rounds in found.items()
    }


def ratios(found: dict[str, list[Figures]]) -> dict[str, Figures]:
    """The median over the rounds of the first server's figure over that of each other one."""
    (_, first), *others = found.items()
    return {
        arm: {
            name: statistics.median(mine[name] / theirs[name] for mine, theirs in zip(first, rounds, strict=True))
            for name in rounds[0]
            if name in first[0] and all(one[name] for one in rounds)
        }
        for arm, rounds in others
    }


def show(console: Console, middle: dict[str, Figures], beside: dict[str, Figures], title: str) -> None:
    columns = ("figure", "mark", *middle, *(f"over {arm}" for arm in beside))
    rows = []
    for name, label, digits, mark in ROWS:
        if not any(name in figures for figures in middle.values()):
            continue
        cells = [f"{figures[name]:,.{digits}f}" if name in figures else "-" for figures in middle.values()]
        over = [f"{figures[name]:.2f}" if name in figures else "-" for figures in beside.values()]
        rows.append((label, mark, *cells, *over))
    print_table(console, title, columns, rows)


def show_steps(console: Console, middle: dict[str, Figures], steps: Sequence[int]) -> None:
    """Added latency of each server, a row for each size of steps."""
    columns = ("streams in a step", *(label for _, label, _ in STEP_COLUMNS))
    for arm, figures in middle.items():
        rows = [
            (f"{most:,}", *(f"{figures[f'step{most}_{name}']:,.{digits}f}" for name, _, digits in STEP_COLUMNS))
            for most in steps
            if f"step{most}_p50_ms" in figures
        ]
        if rows:
            print_table(console, f"added latency, {arm} (mark: p99 below 1 ms)", columns, rows)


def main(argv: Sequence[str]) -> int:
    options, console = parse(argv), open_console()
    if options.quick:
        options.rounds = 1
    size = size_of(options, console)
    tokenizer = Tokenizer.from_file(resolve_model(options.model, weights=False).tokenizer)
    (token_id,) = tokenizer.encode(TOKEN.decode(), add_special_tokens=False)
    chars_per_token = 100 * len(WORDS) / len(tokenizer.encode(100 * WORDS, add_special_tokens=False))
    try:
        found = rounds_of(options, size, token_id, chars_per_token, console)
    except Lost as error:
        console.print(f"failed: {error}", style="red")
        return 1
    middle, beside = medians(found), ratios(found)
    title = f"the front door: {options.prefill}P{options.decode}D stand-ins, {options.clients} load process, medians"
    show(console, middle, beside, f"{title} of {options.rounds}")
    show_steps(console, middle, size.steps)
    content: dict[str, Any] = {"medians": middle, "ratios_of_the_first": beside, "rounds": found}
    packages = {name: version_of(name) for name in PACKAGES}
    more = {"size": asdict(size), "workers": f"{options.prefill}P{options.decode}D", "packages": packages}
    write_result(options, PROGRAM, argv, content, **more, rounds=options.rounds, model=options.model)
    return 0


if __name__ == "__main__":
    run(main)

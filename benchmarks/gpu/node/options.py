"""Options of `make gpu`, for the process that controls a run and for its child processes."""

from __future__ import annotations

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.node import FIRST, MORE_PARTS, PARTS, SECOND

PROGRAM = "python -m benchmarks.gpu.node"
LIMIT_S, LANDING_S = 530.0, 15.0
PASSED, FAILED, NO_GPU, LOST = 0, 1, 2, 3
"""Exit statuses. LOST: the device no longer responds."""


def parse(argv: Sequence[str], about: str = "") -> Namespace:
    """Parse the options. `about` is the text of --help. `parts` are in order and include `chip`, for the floors."""
    parser = ArgumentParser(PROGRAM, description=about, formatter_class=ArgumentDefaultsHelpFormatter)
    halves = {"first": FIRST, "second": SECOND}
    names = (*halves, *PARTS, *MORE_PARTS)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for the results")
    parser.add_argument("--dry-run", action="store_true", help="use tiny sizes on the CPU and Triton's interpreter")
    parser.add_argument(
        "--parts", nargs="+", choices=names, default=list(halves), metavar="PART", help=", ".join(names)
    )
    parser.add_argument("--device", default="cuda", help="CUDA device")
    parser.add_argument("--time-limit-s", type=float, default=LIMIT_S, help="time limit in seconds; 0 for none")
    parser.add_argument(
        "--landing-s", type=float, default=LANDING_S, help="duration of transfers in replays, in seconds"
    )
    parser.add_argument("--kv-memory-gib", type=float, default=24.0, help="size of the KV cache per worker, in GiB")
    parser.add_argument("--requests", type=int, default=128, help="requests per arm of the service")
    parser.add_argument(
        "--full", action="store_true", help="use more repeats and lengths, which takes longer than ten minutes"
    )
    parser.add_argument("--skip", nargs="+", default=(), metavar="WORD", help="skip kernels whose name contains WORD")
    options = parser.parse_args(argv)
    wanted = {part for name in options.parts for part in halves.get(name, {name: 0})}
    options.parts = [part for part in (*PARTS, *MORE_PARTS) if part in {"chip", *wanted}]
    options.quick = not options.full
    if options.dry_run:
        options.landing_s = min(options.landing_s, 0.2)
    return options


def seconds_of(part: str, options: Namespace) -> float:
    """Return the deadline of a part, in seconds. 0: none, in a dry run, because the interpreter is slow."""
    return 0.0 if options.dry_run or options.full else float((PARTS | MORE_PARTS)[part])

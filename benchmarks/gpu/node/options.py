"""Options of `make gpu`, for the process that directs a run and for those that measure."""

from __future__ import annotations

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.node import FIRST, MORE_PARTS, PARTS, SECOND

PROGRAM = "python -m benchmarks.gpu.node"
LIMIT_S, LANDING_S = 530.0, 15.0
PASSED, FAILED, NO_GPU, LOST = 0, 1, 2, 3
"""Exit statuses; LOST is that of a process whose device does not answer any more."""


def parse(argv: Sequence[str], about: str = "") -> Namespace:
    """`about` is the text of --help. The parts come in their order, with `chip`, which every floor derives from."""
    parser = ArgumentParser(PROGRAM, description=about, formatter_class=ArgumentDefaultsHelpFormatter)
    halves = {"first": FIRST, "second": SECOND}
    names = (*halves, *PARTS, *MORE_PARTS)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for the results")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, kernels in Triton's interpreter")
    parser.add_argument(
        "--parts", nargs="+", choices=names, default=list(halves), metavar="PART", help=", ".join(names)
    )
    parser.add_argument("--device", default="cuda", help="CUDA device")
    parser.add_argument("--time-limit-s", type=float, default=LIMIT_S, help="end by then; 0: no limit")
    parser.add_argument("--landing-s", type=float, default=LANDING_S, help="seconds of transfers during replays")
    parser.add_argument("--kv-memory-gib", type=float, default=24.0, help="KV memory of each worker in the service")
    parser.add_argument("--requests", type=int, default=128, help="requests to each arm of the service")
    parser.add_argument("--full", action="store_true", help="more repeats, lengths and time than ten minutes have")
    parser.add_argument("--skip", nargs="+", default=(), metavar="WORD", help="leave out kernels of such names")
    options = parser.parse_args(argv)
    wanted = {part for name in options.parts for part in halves.get(name, {name: 0})}
    options.parts = [part for part in (*PARTS, *MORE_PARTS) if part in {"chip", *wanted}]
    options.quick = not options.full
    if options.dry_run:
        options.landing_s = min(options.landing_s, 0.2)
    return options


def seconds_of(part: str, options: Namespace) -> float:
    """The deadline of a part; 0: none, because an interpreter's pace says nothing."""
    return 0.0 if options.dry_run or options.full else float((PARTS | MORE_PARTS)[part])

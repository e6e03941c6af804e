"""Diptych on one GPU, in a few minutes: checks every kernel, times it beside its floor, and measures the service.

The chip's copy bandwidth and matrix rate come first, because every floor derives from them. Then every kernel is
checked against a plain reference. Then come kernels, model, transfer and the whole service, aggregated and as two
pools, on random weights of Llama-8B's shape. A kernel that is wrong is not timed, nor are the parts that run it. When a
part fails, the others are still measured; the exit status is 1, as when the time limit came first. The result is a few
tables and a JSON file, written after each figure. Without a CUDA device the exit status is 2; --dry-run runs everything
on the CPU, at meaningless sizes.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.script import script_parser
from benchmarks.time_limit import time_limit

PROGRAM = "python -m benchmarks.gpu"
SECTIONS = ("kernels", "engine", "transfer", "serving")
MORE_SECTIONS = ("tiles",)
OK, WRONG, NO_GPU = 0, 1, 2


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, __doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, two prefill lengths, a short load")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, kernels in Triton's interpreter")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS + MORE_SECTIONS, default=SECTIONS, help="sections to measure"
    )
    parser.add_argument("--device", default="cuda", help="CUDA device")
    parser.add_argument("--kv-memory-gib", type=float, default=24.0, help="KV memory of each worker in the service")
    parser.add_argument("--requests", type=int, default=128, help="requests to each arm of the service")
    parser.add_argument(
        "--skip", nargs="+", default=(), metavar="WORD", help="leave out kernels whose names contain one of these"
    )
    parser.add_argument(
        "--time-limit-s", type=float, default=0.0, help="leave out figures that are missing by then; 0: no limit"
    )
    parser.add_argument("--log-dir", type=Path, help="keep the workers' logs here")
    parser.epilog = "Without --output the result goes to a file of today in benchmarks/results."
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
    with time_limit(options.time_limit_s):
        return measure(options, argv)


def measure(options: Namespace, argv: Sequence[str]) -> int:
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        print("There is no CUDA device here: nothing was measured. --dry-run tries the script itself.")
        return NO_GPU
    from benchmarks.gpu.suite import Suite

    with torch.inference_mode():
        return OK if Suite(options, argv, options.output or default_path(options)).run() else WRONG


def default_path(options: Namespace) -> Path | None:
    """None for a dry run, whose figures mean nothing."""
    if options.dry_run:
        return None
    return Path(__file__).resolve().parents[1] / "results" / f"gpu-{datetime.now(UTC):%Y-%m-%d}.json"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""A cluster of paced workers: real processes whose model waits as long as a file of coefficients says.

    python -m benchmarks.paced --prefill 8 --decode 8 --routers 2 --coefficients FILE

It prints the routers' URLs, and runs until Ctrl-C or SIGTERM. A worker that waits takes no core, so a small machine
runs many; messages, scheduling, KV bytes and HTTP are real. The file is JSON, seconds as in
`common/latency/step_model.py`:

    {"prefill": {"fixed_s": 0.004, "floor_s": 0.008, "token_s": 4e-5, "pair_s": 1e-9},
     "decode": {"fixed_s": 0.009, "row_s": 1e-4, "context_s": 4e-8, "token_s": 4e-5},
     "kv_bytes": 1024}
"""

from __future__ import annotations

import signal
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.paced.stack import EXAMPLE, MAX_MODEL_LEN, PacedStack
from benchmarks.script import run
from benchmarks.stack import StackSettings
from benchmarks.time_limit import TimeOver

PROGRAM: Final = "python -m benchmarks.paced"


def parse(argv: Sequence[str]) -> Namespace:
    parser = ArgumentParser(PROGRAM, description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--prefill", type=int, default=2, help="prefill workers")
    parser.add_argument("--decode", type=int, default=2, help="decode workers")
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--coefficients", type=Path, default=EXAMPLE, metavar="FILE")
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN, help="longest prompt plus answer in tokens")
    for kind in ("worker", "prefill", "decode", "router"):
        parser.add_argument(f"--{kind}-flags", default="", help=f"flags for every {kind}, in one argument")
    parser.add_argument("--log-dir", type=Path, help="keep the logs here")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    stack = PacedStack(
        StackSettings(
            options.prefill,
            options.decode,
            routers=options.routers,
            worker_flags=options.worker_flags.split(),
            prefill_flags=options.prefill_flags.split(),
            decode_flags=options.decode_flags.split(),
            router_flags=options.router_flags.split(),
            log_dir=options.log_dir,
        ),
        coefficients=options.coefficients,
        max_model_len=options.max_model_len,
    )
    try:
        with stack:
            for router in stack.routers:
                print(router.http_url, flush=True)
            signal.pause()
    except (KeyboardInterrupt, TimeOver):
        pass  # asked to end: nothing is left running
    return 0


if __name__ == "__main__":
    run(main)

"""Everything that one GPU can tell about Diptych, within ten minutes, a line with PASS or FAIL for each finding.

In this order: what the chip can do, the check of a worker's start, recorded steps beside plain ones in every bucket,
batch-invariant steps beside each other, a minute of KV transfers that land during replays, all other checks, kernels
beside their floor and their peers (FlashInfer and FlashAttention-3, where they can be imported), prefill attention
whose keys TMA copies beside that by pointers, the kernels of a decode step and what launches them, prefill and decode
steps, the service, transfers, the check at the shapes of other families, a worker of two ranks. Each line is written
at once, so a run that is cut short has told what it knew.
The folder gets verdicts.txt, gpu.json, gpu.png and the workers' logs. The exit status is 0 if every verdict is PASS, 1
if not, 2 without a CUDA device; --dry-run runs every part on the CPU, at tiny sizes, in Triton's interpreter.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.node import PARTS
from benchmarks.time_limit import time_limit

PROGRAM = "python -m benchmarks.gpu.node"
LIMIT_S, LANDING_S = 570.0, 60.0
PASSED, FAILED, NO_GPU = 0, 1, 2


def parse(argv: Sequence[str]) -> Namespace:
    parser = ArgumentParser(PROGRAM, description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for the results")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, kernels in Triton's interpreter")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to run")
    parser.add_argument("--device", default="cuda", help="CUDA device")
    parser.add_argument("--time-limit-s", type=float, default=LIMIT_S, help="end by then; 0: no limit")
    parser.add_argument("--landing-s", type=float, default=LANDING_S, help="seconds of transfers during replays")
    parser.add_argument("--kv-memory-gib", type=float, default=24.0, help="KV memory of each worker in the service")
    parser.add_argument("--requests", type=int, default=128, help="requests to each arm of the service")
    parser.add_argument("--full", action="store_true", help="more repeats and lengths than ten minutes hold")
    parser.add_argument("--skip", nargs="+", default=(), metavar="WORD", help="leave out checks of such names")
    options = parser.parse_args(argv)
    options.quick, options.log_dir = not options.full, options.out / "workers"
    if options.dry_run:
        options.landing_s = min(options.landing_s, 0.2)
    return options


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        print("There is no CUDA device here: nothing was measured. --dry-run tries every part.")
        return NO_GPU
    from benchmarks.gpu.node.run import NodeRun

    options.out.mkdir(parents=True, exist_ok=True)
    with time_limit(options.time_limit_s), torch.inference_mode():
        run = NodeRun(options, argv, options.out)
        complete = run.run()
    picture(run.found, options.out / "gpu.png")
    failed = sum(not (one.ok or one.skipped) for one in run.verdicts)
    print(f"{len(run.verdicts)} verdicts, {failed} FAIL; {options.out} has verdicts.txt, gpu.json and logs")
    return PASSED if complete and run.passed else FAILED


def picture(found: Mapping[str, Any], path: Path) -> None:
    """Drawn last, and only where there is matplotlib."""
    try:
        from benchmarks.gpu.node.picture import draw
    except ImportError as error:
        print(f"no picture: {error}")
        return
    draw(path, found)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

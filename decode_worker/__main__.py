"""`python -m decode_worker`: one decode worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from common.config import DecodeWorkerConfig
from common.config.sources import load
from common.observe.logging import setup_logging


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM; 0 after a clean end, 2 when the configuration or the model is refused."""
    config = load(DecodeWorkerConfig, argv, prog="diptych decode-worker")
    setup_logging(config.worker_id or "decode", config.log_level, json=config.log_json)
    # Imported after the command line is understood: --help and refusals need no torch.
    from common.machine.compute_threads import pin_to_cores, spin_briefly

    pin_to_cores(config.cores)
    spin_briefly()
    from common.worker.process import run_worker
    from decode_worker.process import DecodeWorker

    return run_worker(lambda: DecodeWorker(config))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    from common.worker.process import end_process

    end_process(status)

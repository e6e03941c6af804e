"""`python -m prefill_worker`: one prefill worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from common.config import PrefillWorkerConfig
from common.config.sources import load
from common.observe.logging import setup_logging


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM; 0 after a clean end, 2 when the configuration or the model is refused."""
    config = load(PrefillWorkerConfig, argv, prog="diptych prefill-worker")
    setup_logging(config.worker_id or "prefill", config.log_level, json=config.log_json)
    # Imported after the command line is understood: --help and refusals need no torch.
    from common.machine.compute_threads import pin_to_cores, spin_briefly

    pin_to_cores(config.cores)
    spin_briefly()
    from common.worker.process import run_worker
    from prefill_worker.process import PrefillWorker

    return run_worker(lambda: PrefillWorker(config))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    from common.worker.process import end_process

    end_process(status)

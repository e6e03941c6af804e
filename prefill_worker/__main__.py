"""`python -m diptych.prefill_worker`: one prefill worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from diptych.common.config import load
from diptych.common.logging import setup_logging
from diptych.common.settings import PrefillWorkerConfig


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM; 0 after a clean end, 2 when the configuration or the model is refused."""
    config = load(PrefillWorkerConfig, argv, prog="diptych prefill-worker")
    setup_logging(config.worker_id or "prefill", config.log_level, json=config.log_json)
    # Imported after the command line is understood: --help and refusals need no torch.
    from diptych.common.compute_threads import pin_to_cores, spin_briefly

    pin_to_cores(config.cores)
    spin_briefly()
    from diptych.common.worker_process import run_worker
    from diptych.prefill_worker.process import PrefillWorker

    return run_worker(lambda: PrefillWorker(config))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    from diptych.common.worker_process import end_process

    end_process(status)

"""`python -m decode_worker`: one decode worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.config import DecodeWorkerConfig, PrefillWorkerConfig
from common.worker.command import run_command

if TYPE_CHECKING:
    from common.worker.process import WorkerProcess


def build(config: DecodeWorkerConfig, other: PrefillWorkerConfig | None) -> WorkerProcess:
    # Imported here: they import torch.
    from common.worker.process import WorkerProcess
    from decode_worker.duty import decode_offer

    if other is None:
        return WorkerProcess(decode_offer(config))
    from prefill_worker.duty import prefill_offer

    return WorkerProcess(decode_offer(config), prefill_offer(other))


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM; 0 after a clean end, 2 when the configuration or the model is refused."""
    return run_command(argv, DecodeWorkerConfig, PrefillWorkerConfig, "decode", build)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    from common.worker.process import end_process

    end_process(status)

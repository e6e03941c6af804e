"""`python -m prefill_worker`: one prefill worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.config import PrefillWorkerConfig
from common.worker.command import run_command

if TYPE_CHECKING:
    from prefill_worker.process import PrefillWorker


def build(config: PrefillWorkerConfig) -> PrefillWorker:
    from prefill_worker.process import PrefillWorker  # which imports torch

    return PrefillWorker(config)


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM; 0 after a clean end, 2 when the configuration or the model is refused."""
    return run_command(argv, PrefillWorkerConfig, "prefill", build)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    from common.worker.process import end_process

    end_process(status)

"""`python -m decode_worker`: one decode worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.config import DecodeWorkerConfig
from common.worker.command import run_command

if TYPE_CHECKING:
    from decode_worker.process import DecodeWorker


def build(config: DecodeWorkerConfig) -> DecodeWorker:
    from decode_worker.process import DecodeWorker  # which imports torch

    return DecodeWorker(config)


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM; 0 after a clean end, 2 when the configuration or the model is refused."""
    return run_command(argv, DecodeWorkerConfig, "decode", build)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    from common.worker.process import end_process

    end_process(status)

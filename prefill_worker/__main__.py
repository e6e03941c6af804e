"""Entry point of a prefill worker: `python -m prefill_worker`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from common.engine.worker import run_role


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM. Returns 0 after a clean shutdown, 2 if the configuration or the model is refused."""
    return run_role("prefill", argv)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    from common.engine.worker import end_process

    end_process(status)

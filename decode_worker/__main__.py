"""`python -m decode_worker`: one decode worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from common.engine.worker import run_role


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM; 0 after a clean end, 2 when the configuration or the model is refused."""
    return run_role("decode", argv)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    from common.engine.worker import end_process

    end_process(status)

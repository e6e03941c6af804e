"""A decode worker as a test wants it: it dies of every prompt that begins with POISON. Arguments: flags."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from common.runner.runner import ModelRunner
from decode_worker.__main__ import main

POISON = [13, 13, 13, 66, 66, 66]
prepare = ModelRunner.prepare


def prepare_or_die(self: ModelRunner, chunks: Any) -> Any:
    if any(chunk.start == 0 and list(chunk.token_ids[: len(POISON)]) == POISON for chunk in chunks):
        os.kill(os.getpid(), signal.SIGKILL)
    return prepare(self, chunks)


if __name__ == "__main__":
    ModelRunner.prepare = prepare_or_die  # type: ignore[method-assign]
    raise SystemExit(main(sys.argv[1:]))

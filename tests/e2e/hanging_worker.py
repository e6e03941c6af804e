"""A worker as a test wants it: once FILE exists, its next step never ends, or takes as many seconds more as FILE says,
or as many for each token ("0.2 a token").

Arguments: ROLE, FILE, flags.
"""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path
from typing import Any

from common.runner.runner import ModelRunner

role, hang = sys.argv[1], Path(sys.argv[2])
run = ModelRunner.run


def run_or_hang(self: ModelRunner, *arguments: Any) -> Any:
    if hang.exists():
        text, _, a_token = hang.read_text().partition(" ")
        count = arguments[0].num_tokens if a_token else 1
        threading.Event().wait(float(text) * count if text else None)
    return run(self, *arguments)


ModelRunner.run = run_or_hang  # type: ignore[method-assign]
raise SystemExit(importlib.import_module(f"{role}_worker.__main__").main(sys.argv[3:]))

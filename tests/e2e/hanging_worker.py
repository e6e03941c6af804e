"""A worker as a test wants it: once FILE exists, its next step never ends, or takes as many seconds more as FILE says.

Arguments: ROLE, FILE, flags.
"""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path
from typing import Any

from diptych.common.model.runner import ModelRunner

role, hang = sys.argv[1], Path(sys.argv[2])
run = ModelRunner.run


def run_or_hang(self: ModelRunner, *arguments: Any) -> Any:
    if hang.exists():
        text = hang.read_text()
        threading.Event().wait(float(text) if text else None)
    return run(self, *arguments)


ModelRunner.run = run_or_hang  # type: ignore[method-assign]
raise SystemExit(importlib.import_module(f"diptych.{role}_worker.__main__").main(sys.argv[3:]))

"""A decode worker as a test wants it: once FILE exists, its next step never ends. Arguments: FILE, flags."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from diptych.common.model.runner import ModelRunner
from diptych.decode_worker.__main__ import main

hang = Path(sys.argv[1])
run = ModelRunner.run


def run_or_hang(self: ModelRunner, *arguments: Any) -> Any:
    if hang.exists():
        threading.Event().wait()
    return run(self, *arguments)


ModelRunner.run = run_or_hang  # type: ignore[method-assign]
raise SystemExit(main(sys.argv[2:]))

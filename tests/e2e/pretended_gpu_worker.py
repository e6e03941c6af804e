"""A worker whose cache is in memory of a pretended GPU, which other pretended GPUs read.

Arguments: ROLE, flags. `--kv-transport cuda-ipc` is taken on the CPU.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))
from common.config import WorkerConfig
from tests import pretended_cuda

role = sys.argv[1]
usual = WorkerConfig.check


def check(self: WorkerConfig) -> None:
    with patch.object(WorkerConfig, "exports_kv", False):  # the device is the CPU, which exports nothing
        usual(self)


WorkerConfig.check = check  # type: ignore[method-assign]
pretended_cuda.use()
raise SystemExit(importlib.import_module(f"{role}_worker.__main__").main(sys.argv[2:]))

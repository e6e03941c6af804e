"""A rank's process with as much memory as its test says: `python -m tests.common.engine.ranks.pretended_memory`.

Its CPU stands for a GPU, where `PRETENDED_GIB` are free, and steps with their cache take `STEP` bytes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

GIB, STEP = 2**30, 2**20
FREE_GIB, CALLS = "PRETENDED_GIB", "PRETENDED_CALLS"


class PretendedDevice:
    """Implements `DeviceMemory`. The steps that it measures run, and are counted in a file."""

    def __init__(self, device: torch.device, free_gib: float = 0.0) -> None:
        self._free = int((free_gib or float(os.environ[FREE_GIB])) * GIB)

    def free_and_total(self) -> tuple[int, int]:
        return self._free, 100 * self._free

    def used(self) -> int:
        return 0

    def peak_of(self, run: Callable[[], None]) -> int:
        run()
        if CALLS in os.environ:
            Path(os.environ[CALLS]).touch()
        return STEP


if __name__ == "__main__":
    from common.engine.ranks import follower
    from common.engine.ranks.__main__ import main

    vars(follower)["CUDAMemory"] = PretendedDevice
    status = main([int(each) for each in sys.argv[1:]])
    sys.stdout.flush()
    os._exit(status)

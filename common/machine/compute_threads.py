"""Settings of a worker's compute threads. They take effect only before torch is imported."""

from __future__ import annotations

import os

from common.config import parse_cores

SPIN_COUNT = "2000"
"""Rounds that an idle OpenMP thread spins before it sleeps. By default it spins for milliseconds, during which other
workers cannot use its core: two workers on two cores then miss whole scheduler ticks (docs/performance.md)."""


def pin_to_cores(cores: str) -> None:
    """Restrict this process to the configured cores."""
    wanted = parse_cores(cores)
    if wanted and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, wanted)


def spin_briefly() -> None:
    """Let idle OpenMP threads sleep soon, unless the environment says otherwise."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

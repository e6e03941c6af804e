"""Waiting for what threads, tasks and processes do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 60.0
POLL_S = 0.002


def wait_until(
    condition: Callable[[], object],
    what: str = "the condition did not come true",
    patience_s: float = PATIENCE_S,
    *,
    meanwhile: Callable[[], object] = lambda: time.sleep(POLL_S),
) -> None:
    """Poll a condition. Fails with `what` after `patience_s`. `meanwhile` runs between two looks, else a sleep."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {patience_s:g} s: {what}"
        meanwhile()


async def until(
    condition: Callable[[], object], what: str = "the condition did not come true", patience_s: float = PATIENCE_S
) -> None:
    """`wait_until` for tasks: other tasks run between two looks."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {patience_s:g} s: {what}"
        await asyncio.sleep(POLL_S)

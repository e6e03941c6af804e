"""What the processes of a stack say of themselves: blocks, requests, counters, memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import httpx
import psutil

from benchmarks.stack import Stack, StackProcess

from ..rig import PROBE_TIMEOUT_S, samples, why_busy

POLL_S = 0.05
PATIENCE_S = 90.0


async def fetch(process: StackProcess, path: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False) as client:
        return await client.get(f"{process.http_url}{path}")


async def until(condition: Callable[[], Awaitable[bool]], what: str, within_s: float = PATIENCE_S) -> None:
    """Wait for a condition. Fails with `what` when it does not come true."""
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(POLL_S)


async def is_ready(process: StackProcess) -> bool:
    try:
        return (await fetch(process, "/ready")).status_code == 200
    except httpx.TransportError:
        return False


async def counter(processes: Sequence[StackProcess], name: str, label: str = "") -> float:
    """The sum of a metric's samples over processes, of those samples that have `label` among their labels."""
    found = [await asyncio.to_thread(samples, process, name, label) for process in processes]
    return sum(map(sum, found))


async def still_held(stack: Stack) -> str:
    """Which worker owns blocks or is not healthy, and which router has requests; "" when none is or has."""
    held = {worker.name: await asyncio.to_thread(why_busy, worker) for worker in stack.workers()}
    for router in stack.routers:
        stages = (await fetch(router, "/load")).json()["stages"]
        held[router.name] = f"has {stages}" if any(stages.values()) else ""
    return ", ".join(f"{name} {why}" for name, why in held.items() if why)


async def settle(stack: Stack, within_s: float = 60.0) -> float:
    """Wait until no worker holds anything for a request; the seconds that took. Fails with the numbers."""
    began = time.monotonic()
    while held := await still_held(stack):
        assert time.monotonic() - began < within_s, f"{within_s:g} s after the last request: {held}"
        await asyncio.sleep(POLL_S)
    return time.monotonic() - began


def memory_mib(process: StackProcess) -> float:
    """Resident memory."""
    return float(psutil.Process(process.pid).memory_info().rss) / 2**20

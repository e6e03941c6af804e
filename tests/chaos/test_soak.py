"""A long mixed load: answers stay right, and nothing that a process holds grows."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .soak import Sampler, read_slowly
from .storm import Load
from .streams import Client, answers, plan
from .watch import settle

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(0)]

SAMPLES = 60
"""How often, whatever the duration; but not more often than once a second."""
SLOW_READERS = 2


async def sipping(url: str, until: float, pause_s: float = 0.05) -> int:
    """Slow readers, one after the other; how many there were."""
    count = 0
    while time.monotonic() < until:
        body = {"prompt": [count % 256] * 50, "max_tokens": 200, "ignore_eos": True}
        assert await read_slowly(url, body, pause_s=pause_s)
        count += 1
    return count


async def test_nothing_grows(stacks: Any, report: Any) -> None:
    """SOAK_SECONDS long (`make soak` says half an hour), with a plot in SOAK_PLOT."""
    seconds = float(os.environ.get("SOAK_SECONDS", "60"))
    stack = stacks(1, 2, routers=2, worker_flags=("--num-blocks", "800"))
    asks = plan(11, 200)
    async with Client(stack.url) as client:
        expected = await answers(client, asks, salt="undisturbed")
    load, sampler = Load(stack, asks, at_once=12), Sampler(stack.everything, max(1.0, seconds / SAMPLES))
    until = time.monotonic() + seconds
    sampling = asyncio.create_task(sampler.run())
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(), refresh_per_second=1) as progress:
        bar = progress.add_task("soak", total=seconds)

        async def show() -> None:
            while True:
                done = seconds - (until - time.monotonic())
                progress.update(bar, completed=done, description=f"{len(load.answered)} streams ended")
                await asyncio.sleep(1.0)

        showing = asyncio.create_task(show())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run(until))
            readers = [tasks.create_task(sipping(stack.url, until)) for _ in range(SLOW_READERS)]
        showing.cancel()
    sampling.cancel()
    await asyncio.wait([sampling])
    if not sampling.cancelled():
        sampling.result()
    await settle(stack)
    rows: list[tuple[str, Any]] = [
        ("streams", f"{len(load.answered)}, and {sum(reader.result() for reader in readers)} read slowly"),
        *sampler.rows(),
        ("load of the machine", f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"),
    ]
    report(f"soak of {seconds:g} s: begin to end (trend of the second half)", rows)
    if path := os.environ.get("SOAK_PLOT"):
        sampler.plot(Path(path))
    problems = load.problems(expected)
    assert not problems, f"{len(problems)} of {len(load.answered)} streams:\n" + "\n".join(problems[:20])
    assert not sampler.grown(), "\n".join(sampler.grown())

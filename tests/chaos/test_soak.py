"""A long mixed load: answers stay right, and nothing that a process holds grows."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.stack import StackProcess

from .streams import Client, answers, plan
from .test_storm import Load
from .watch import counter, settle

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(0)]


# What processes hold, sampled over time, and whether it grows.

LIMITS = {"memory, MiB": 16.0, "files": 15.0, "sockets": 6.0, "threads": 2.0, "tasks": 12.0}
"""By how much the trend of the second half may rise in all, from its begin to its end.

A worker's first hand-over to a peer, or pull from one, opens a socket of about seven files, and there are two peers.
"""
MEMORY_SHARE = 0.04
"""Memory may rise by this share of itself instead, where that is more."""


@dataclass
class Series:
    """One quantity of one process; times in seconds after the begin."""

    process: str
    name: str
    at: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """The rise over the second half: its length times the median of all slopes between two of its samples.

        That is the Theil-Sen estimator, which a few outliers do not move.
        """
        half = len(self.at) // 2
        points = list(zip(self.at[half:], self.values[half:], strict=True))
        slopes = sorted((b - a) / (t - s) for (s, a), (t, b) in itertools.combinations(points, 2))
        return slopes[len(slopes) // 2] * (points[-1][0] - points[0][0]) if slopes else 0.0

    @property
    def limit(self) -> float:
        share = MEMORY_SHARE * max(self.values) if self.name.startswith("memory") else 0.0
        return max(LIMITS[self.name], share)


class Sampler:
    """Looks at every process every few seconds."""

    def __init__(self, processes: Sequence[StackProcess], every_s: float) -> None:
        self._processes, self._every_s = processes, every_s
        self.series = [Series(process.name, name) for process in processes for name in LIMITS]

    async def run(self) -> None:
        """Sample until cancelled."""
        began = time.monotonic()
        while True:
            now = time.monotonic() - began
            series = iter(self.series)
            for process in self._processes:
                for value in await _sample(process):
                    one = next(series)
                    one.at.append(now)
                    one.values.append(value)
            await asyncio.sleep(self._every_s)

    def grown(self) -> list[str]:
        """What grows by more than its limit."""
        return [
            f"{one.process}: {one.name} grew by {one.growth:.1f} (allowed {one.limit:.1f}) to {one.values[-1]:.0f}"
            for one in self.series
            if one.growth > one.limit
        ]

    def rows(self) -> list[tuple[str, str]]:
        """Per process: first, last and trend of everything."""
        rows: dict[str, list[str]] = {}
        for one in self.series:
            text = f"{one.name} {one.values[0]:.0f} to {one.values[-1]:.0f} ({one.growth:+.1f})"
            rows.setdefault(one.process, []).append(text)
        return [(name, ", ".join(texts)) for name, texts in rows.items()]

    def plot(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(
            len(LIMITS), 1, sharex=True, figsize=(9, 2.2 * len(LIMITS)), layout="constrained"
        )
        for axis, name in zip(axes, LIMITS, strict=True):
            for one in self.series:
                if one.name == name:
                    axis.plot([at / 60 for at in one.at], one.values, label=one.process, linewidth=1)
            axis.set_ylabel(name)
            axis.set_ylim(bottom=0)
        axes[0].legend(ncols=4, fontsize="small")
        axes[-1].set_xlabel("minutes")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


async def _sample(process: StackProcess) -> tuple[float, ...]:
    """In the order of LIMITS."""
    found = psutil.Process(process.pid)
    with found.oneshot():
        memory = found.memory_info().rss / 2**20
        numbers = (found.num_fds(), len(found.net_connections("all")), found.num_threads())
    return (memory, *numbers, await counter([process], "diptych_asyncio_tasks"))


async def read_slowly(url: str, body: dict[str, object], *, pause_s: float) -> int:
    """A client that reads a stream in sips; the bytes it got."""
    size = 0
    async with (
        httpx.AsyncClient(timeout=600, trust_env=False) as http,
        http.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as reply,
    ):
        async for sip in reply.aiter_raw(512):
            size += len(sip)
            await asyncio.sleep(pause_s)
    return size


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

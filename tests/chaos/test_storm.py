"""Workers are killed, frozen, ended and given other roles at random under load.

Every stream goes on, and says what it would have said.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.stack import Stack

from .storm import ACTS, ROLE_ACTS, Load, Storm, longest_gaps, summary
from .streams import Client, Heard, answers, plan
from .watch import counter, memory_mib, settle

MAX_WORKER_MIB, MAX_ROUTER_MIB = 1200, 600
COUNTERS = {
    "takeovers": ("diptych_takeovers", ""),
    "hand-overs": ("diptych_handovers", 'outcome="done"'),
    "hand-overs that failed": ("diptych_handovers", 'outcome="failed"'),
    "moves": ("diptych_retries", ""),
    "late tokens dropped": ("diptych_stale_deltas", ""),
    "connections cut": ("diptych_worker_cuts", ""),
    "failures": ("diptych_failures", ""),
}


async def undisturbed(stack: Stack, asks: Any) -> list[Heard]:
    async with Client(stack.url) as client:
        return await answers(client, asks, salt="undisturbed")


async def watched(load: Load, storm: Storm, seconds: float) -> None:
    """Load and storm side by side, with a progress bar."""
    until = time.monotonic() + seconds
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(), refresh_per_second=2) as progress:
        bar = progress.add_task("storm", total=seconds)

        async def show() -> None:
            while True:
                left = until - time.monotonic()
                text = f"{len(load.answered)} streams ended, {load.num_running} run, {len(storm.acts)} acts"
                progress.update(bar, completed=seconds - left, description=text)
                await asyncio.sleep(0.5)

        showing = asyncio.create_task(show())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run(until))
            tasks.create_task(storm.run(until))
        showing.cancel()


async def storm_over(
    stack: Stack,
    report: Any,
    *,
    seed: int,
    seconds: float,
    at_once: int,
    num_asks: int,
    every_s: tuple[float, float],
    acts: Mapping[str, int] = ACTS,
) -> Storm:
    """The whole experiment: what should come, the storm, what came, and what is left behind."""
    asks = plan(seed, num_asks)
    expected = await undisturbed(stack, asks)
    load, storm = Load(stack, asks, at_once), Storm(stack, seed, every_s=every_s, acts=acts)
    await watched(load, storm, seconds)
    settled_s = await settle(stack)
    counters = {title: await counter(stack.routers, *name) for title, name in COUNTERS.items()}
    memory = {process.name: memory_mib(process) for process in stack.everything}
    rows = summary(load, storm, counters)
    rows += [
        ("nothing held after", f"{settled_s:.2f} s"),
        ("memory, MiB", ", ".join(f"{name} {mib:.0f}" for name, mib in memory.items())),
        ("load of the machine", f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"),
    ]
    report(f"seed {seed}: {seconds:g} s, {at_once} streams at a time", rows)
    problems = load.problems(expected)
    assert not problems, f"{len(problems)} of {len(load.answered)} streams:\n" + "\n".join(problems[:20])
    assert storm.acts and load.answered and longest_gaps(load.answered)
    assert set(storm.exit_codes) <= {0}, storm.exit_codes
    for process in stack.everything:
        assert memory[process.name] < (MAX_ROUTER_MIB if process.role == "router" else MAX_WORKER_MIB), memory
    return storm


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(300)
async def test_no_stream_notices_a_short_storm(stacks: Any, report: Any) -> None:
    stack = stacks(2, 2, routers=2, router_flags=("--local-prefill-threshold", "32"))
    await storm_over(stack, report, seed=7, seconds=12.0, at_once=12, num_asks=60, every_s=(1.0, 2.0))


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(300)
async def test_no_stream_notices_roles_that_change_in_a_short_storm(stacks: Any, report: Any) -> None:
    flags = ("--local-prefill-threshold", "32")
    stack = stacks(2, 2, routers=2, router_flags=flags, worker_flags=("--role-change",))
    storm = await storm_over(
        stack, report, seed=3, seconds=12.0, at_once=12, num_asks=60, every_s=(0.5, 1.5), acts=ROLE_ACTS
    )
    assert storm.changes["to prefill"] + storm.changes["to decode"], storm.changes


@pytest.mark.chaos
@pytest.mark.timeout(3600)
async def test_no_stream_notices_a_long_storm(stacks: Any, report: Any, chaos_seed: int, chaos_seconds: float) -> None:
    stack = stacks(2, 3, routers=2, worker_flags=("--num-blocks", "2000", "--role-change"))
    storm = await storm_over(
        stack,
        report,
        seed=chaos_seed,
        seconds=chaos_seconds,
        at_once=40,
        num_asks=300,
        every_s=(2.0, 5.0),
        acts=ROLE_ACTS,
    )
    assert storm.changes or chaos_seconds < 60, "no worker was given another role"

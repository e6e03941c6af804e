"""Workers with `--engine vllm`, processes of vLLM in them, and routers are killed, frozen and ended under load."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from benchmarks.stack import Stack, StackProcess

from ..rig import ENGINE
from .streams import Ask, Client, Heard, difference, plan
from .test_storm import COUNTERS, DRAIN_TIMEOUT_S, longest_gaps, undisturbed
from .watch import counter, is_ready, settle

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.vllm,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(ENGINE != "vllm", reason="needs TEST_ENGINE=vllm, and vLLM's processes of several workers"),
]
AT_ONCE = 8
BACK_S = 240.0
"""Time in which a worker must be ready again, in seconds: vLLM imports its modules for a minute on busy cores."""
DEATH_S = 30.0
"""Time in which a worker ends that has lost a process of vLLM, in seconds."""
ACTS = ("kill", "kill core", "freeze", "kill rank", "router", "nap", "drain")
SHAPE = os.environ.get("STORM_SHAPE", "1,2")


def asks_of(seed: int, count: int) -> list[Ask]:
    """Greedy streams: vLLM's draws are not those of the same seed when a stream continues elsewhere."""
    bodies = [ask.body for ask in plan(seed, count, prompt_len=(10, 1200), num_tokens=200)]
    for body in bodies:
        body |= {"temperature": 0, "seed": None, "top_p": 1.0}
    return [Ask(body) for body in bodies]


@dataclass
class Load:
    """Keeps streams in flight, spread over the routers. A stream that loses its router is asked for again."""

    stack: Stack
    asks: list[Ask]
    answered: list[tuple[int, Heard]] = field(default_factory=list)
    num_lost_routers: int = 0

    async def run(self, ended: asyncio.Event) -> None:
        turns = iter(range(10**9))

        async def lane() -> None:
            while not ended.is_set():
                turn = next(turns)
                salt = f"round {turn // len(self.asks)}" if turn % 2 else ""
                await self._ask(turn, salt)

        async with asyncio.TaskGroup() as lanes:
            for _ in range(AT_ONCE):
                lanes.create_task(lane())

    async def _ask(self, turn: int, salt: str) -> None:
        index = turn % len(self.asks)
        for attempt in range(100):
            router = self.stack.routers[(turn + attempt) % len(self.stack.routers)]
            async with Client(router.http_url) as client:
                heard = await client.ask(self.asks[index], salt=salt)
            if not heard.error.startswith("connection"):
                self.answered.append((index, heard))
                return
            self.num_lost_routers += 1
            await asyncio.sleep(0.2)
        raise AssertionError("no router answers")


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Storm:
    """Disturbs one process after the other, and waits until it is well again."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self._stack, self._random = stack, random.Random(seed)
        self.acts: list[str] = []
        self.exit_codes: Counter[int | None] = Counter()

    async def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        turns = iter(range(10**9))
        while time.monotonic() < until:
            what = ACTS[next(turns) % len(ACTS)]
            decode, prefill = self._stack.workers("decode"), self._stack.workers("prefill")
            worker = self._random.choice(prefill if self._random.random() < 0.5 else decode)
            await asyncio.sleep(self._random.uniform(1.0, 4.0))
            began = time.monotonic()
            ended_s = await self._act(worker, what)
            self.acts.append(
                f"{what} {'router' if what == 'router' else worker.name}: ended after {ended_s:.1f} s, "
                f"well again after {time.monotonic() - began:.1f} s"
            )

    async def _act(self, worker: StackProcess, what: str) -> float:
        """Returns after how many seconds the process has ended, with all processes below it."""
        began = time.monotonic()
        if what == "router":
            router = self._stack.routers[-1]
            await asyncio.to_thread(router.kill)
            await asyncio.to_thread(self._stack.restart, router)
            await self._until_ready(router)
            return 0.0
        if what in ("freeze", "nap"):
            tree = [psutil.Process(worker.pid)]
            if self._random.random() < 0.5:
                tree += tree[0].children(recursive=True)
            for process in tree:
                process.suspend()
            await asyncio.sleep(self._random.uniform(8.0, 12.0) if what == "freeze" else 0.4)
            for process in tree:
                process.resume()
            await self._until_ready(worker)
            return 0.0
        below = psutil.Process(worker.pid).children(recursive=True)
        if what == "kill":
            await asyncio.to_thread(worker.kill)
        elif what == "drain":
            worker.send_signal(signal.SIGTERM)
            await asyncio.to_thread(worker.wait, time.monotonic() + DRAIN_TIMEOUT_S)
            self.exit_codes[worker.returncode] += 1
        else:
            name = "EngineCore" if what == "kill core" else "Worker"
            next(each for each in below if name in " ".join(each.cmdline())).kill()
            await asyncio.to_thread(worker.wait, time.monotonic() + DEATH_S)
            assert not worker.forced, f"{what}: {worker.log_tail()}"
        _, left = await asyncio.to_thread(psutil.wait_procs, below, DEATH_S)
        assert not left, f"{what} {worker.name}: {left} are left"
        ended_s = time.monotonic() - began
        await asyncio.to_thread(self._stack.restart, worker)
        await self._until_ready(worker)
        return ended_s

    async def _until_ready(self, process: StackProcess) -> None:
        deadline = time.monotonic() + BACK_S
        while not await is_ready(process):
            process.check(deadline, "was not ready again")
            await asyncio.sleep(0.1)


async def test_no_stream_notices(stacks: Any, report: Any, chaos_seed: int, chaos_seconds: float) -> None:
    prefill, decode = map(int, SHAPE.split(","))
    stack = stacks(prefill, decode, routers=2, router_flags=("--local-prefill-threshold", "32"))
    for worker in stack.workers():
        deadline = time.monotonic() + BACK_S
        while not await is_ready(worker):
            worker.check(deadline, "was not ready")
            await asyncio.sleep(0.1)
    processes = {each.pid for each in psutil.Process().children(recursive=True)}
    asks = asks_of(chaos_seed, 60)
    expected = await undisturbed(stack, asks)
    load, storm, ended = Load(stack, asks), Storm(stack, chaos_seed), asyncio.Event()

    async def storm_until_its_end() -> None:
        try:
            await storm.run(chaos_seconds)
        finally:
            ended.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run(ended))
        tasks.create_task(storm_until_its_end())
    settled_s = await settle(stack)
    problems = [f"ask {index}: {why}" for index, heard in load.answered if (why := difference(heard, expected[index]))]
    failed = [problem for problem in problems if "failed" in problem]
    gaps = longest_gaps([_Heard(heard) for _, heard in load.answered])  # type: ignore[list-item]
    counters = {title: await counter(stack.routers, *name) for title, name in COUNTERS.items()}
    rows: list[tuple[str, Any]] = [
        ("streams", f"{len(load.answered)}: {len(failed)} failed, {len(problems) - len(failed)} differ"),
        ("streams that lost their router", load.num_lost_routers),
        ("done", "\n".join(storm.acts)),
        ("status after SIGTERM", dict(storm.exit_codes)),
        ("longest gaps between tokens", ", ".join(f"{seconds:.1f} s" for seconds, _ in gaps[:5])),
        ("nothing held after", f"{settled_s:.2f} s"),
        *((name, f"{value:g}") for name, value in counters.items()),
    ]
    processes |= {each.pid for each in psutil.Process().children(recursive=True)}
    stack.stop()
    left = [pid for pid in processes if is_running(pid)]
    rows.append(("processes left", left))
    report(f"seed {chaos_seed}: {chaos_seconds:g} s", rows)
    assert not problems, f"{len(problems)} of {len(load.answered)} streams:\n" + "\n".join(problems[:20])
    assert set(storm.exit_codes) <= {0}, storm.exit_codes
    assert not left


@dataclass(frozen=True)
class _Heard:
    heard: Heard

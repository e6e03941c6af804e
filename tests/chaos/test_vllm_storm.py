"""Workers with `--engine vllm`, processes of vLLM in them, and routers are killed, frozen and ended under load."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import time
from collections.abc import Mapping
from itertools import cycle
from typing import Any

import psutil
import pytest

from benchmarks.stack import StackProcess

from ..rig import ENGINE
from .streams import Ask, Client, Heard, plan
from .test_storm import DRAIN_TIMEOUT_S, Act, Load, Storm, storm_over
from .watch import is_ready

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.vllm,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(ENGINE != "vllm", reason="needs TEST_ENGINE=vllm, and vLLM's processes of several workers"),
]
BACK_S = 240.0
"""Time in which a worker must be ready again, in seconds: vLLM imports its modules for a minute on busy cores."""
DEATH_S = 30.0
"""Time in which a worker ends that has lost a process of vLLM, and vLLM's processes after their worker, in seconds."""
ACTS = {
    **{"kill": 3, "drain": 3, "kill core": 2, "kill rank": 2},
    **{"freeze": 1, "freeze all": 2, "freeze core": 2, "freeze rank": 1, "nap": 1, "forget": 1},
}
SHAPE = os.environ.get("STORM_SHAPE", "2,2")


def greedy(seed: int, count: int) -> list[Ask]:
    """Greedy streams: vLLM's draws are not those of the same seed when a stream continues elsewhere."""
    bodies = [ask.body for ask in plan(seed, count, prompt_len=(10, 1200), num_tokens=200)]
    return [Ask(body | {"temperature": 0, "seed": None, "top_p": 1.0}) for body in bodies]


class VllmLoad(Load):
    """A stream that loses its router, or finds it draining, is asked for again."""

    async def _ask(self, clients: Mapping[str, Client], router: str, ask: Ask, salt: str) -> Heard:
        for name in [router, *clients] * 50:
            heard = await clients[name].ask(ask, salt=salt)
            if not heard.error.startswith("connection") and "router is shutting down" not in heard.error:
                return heard
            self.num_asked_again += 1
            await asyncio.sleep(0.2)
        raise AssertionError("no router answers")


class VllmStorm(Storm):
    """Also kills and freezes vLLM's own processes, and a router. No process of a worker that ended may be left."""

    back_s = BACK_S

    async def run(self, until: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super().run(until))
            tasks.create_task(self._disturb_router(until))

    async def _disturb_router(self, until: float) -> None:
        router = self._stack.routers[-1]
        for what in cycle(("kill", "drain", "freeze")):
            await asyncio.sleep(self._random.uniform(10.0, 20.0))
            began = time.monotonic()
            if began >= until:
                return
            match what:
                case "kill":
                    await asyncio.to_thread(router.kill)
                case "drain":
                    router.send_signal(signal.SIGTERM)
                    await asyncio.to_thread(router.wait, began + DRAIN_TIMEOUT_S)
                    self.exit_codes[router.returncode] += 1
                case _:
                    await self._freeze(router, self._random.uniform(1.0, 5.0))
            if not router.alive:
                await asyncio.to_thread(self._stack.restart, router)
            await self._until_ready(router)
            now = time.monotonic()
            self.acts.append(Act(began - self.began_at, router.name, what, now - began))

    async def _do(self, worker: StackProcess, what: str) -> None:
        process = psutil.Process(worker.pid)
        tree = process.children(recursive=True)
        how, _, whom = what.partition(" ")
        if whom == "core" or whom == "rank":
            title = "VLLM::EngineCore" if whom == "core" else "VLLM::Worker"
            chosen = [each for each in tree if title in " ".join(each.cmdline())]
            assert chosen, f"{worker.name} has no process {title}"
        else:
            chosen = [process, *tree]
        if how == "freeze" and whom:
            for each in chosen:
                each.suspend()
            await asyncio.sleep(self._random.uniform(4.0, 30.0 if whom != "all" else 8.0))
            for each in chosen:
                each.resume()
        elif whom:
            chosen[0].kill()
            await asyncio.to_thread(worker.wait, time.monotonic() + DEATH_S)
            assert not worker.forced, f"{what} {worker.name}: it has not ended\n{worker.log_tail()}"
            await self._restart(worker)
        else:
            await super()._do(worker, what)
        if worker.pid != process.pid:
            _, left = await asyncio.to_thread(psutil.wait_procs, tree, DEATH_S)
            assert not left, f"{what} {worker.name}: {left} are left"


async def test_no_stream_notices(stacks: Any, report: Any, chaos_seed: int, chaos_seconds: float) -> None:
    prefill, decode = map(int, SHAPE.split(","))
    stack = stacks(prefill, decode, routers=2, router_flags=("--local-prefill-threshold", "32"))
    for worker in stack.workers():
        deadline = time.monotonic() + BACK_S
        while not await is_ready(worker):
            worker.check(deadline, "was not ready")
            await asyncio.sleep(0.1)
    await storm_over(
        stack,
        report,
        seed=chaos_seed,
        seconds=chaos_seconds,
        at_once=8,
        num_asks=60,
        every_s=(2.0, 8.0),
        acts=ACTS,
        asks=greedy(chaos_seed, 60),
        new_load=VllmLoad,
        new_storm=VllmStorm,
    )
    stack.stop()
    for process in stack.everything:
        lines = process.log.read_text(errors="replace").splitlines()
        assert not [line for line in lines if "staging slots belong to no request" in line]

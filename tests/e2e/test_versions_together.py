"""Processes of two neighbouring protocol versions in one service, which is upgraded and rolled back under load."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.stack import Stack, StackProcess

from ..rig import make_stack, samples

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(560)]

OLD = Path(__file__).parents[1] / "previous_version.py"
PREVIOUS_PYTHON = os.environ.get("PREVIOUS_PYTHON", "")
"""Interpreter of another checkout, whose processes replace those of `OLD`: to compare with a real release by hand."""
STEP_S = 120.0
NUM_CLIENTS = 6
ORDERS = list(itertools.permutations(("router", "prefill", "decode")))


def set_version(process: StackProcess, *, old: bool) -> None:
    """Have the process be of the previous version from its next start on."""
    module = process.command.index("router" if process.role == "router" else f"{process.role}_worker")
    flags = process.command[module:]
    if not old:
        process.command = [sys.executable, "-P", "-m", *flags]
    else:
        process.command = (
            [PREVIOUS_PYTHON, "-P", "-m", *flags] if PREVIOUS_PYTHON else [sys.executable, "-P", str(OLD), *flags]
        )


@dataclass
class Upgrade:
    """A stack under load. `listed` routers get requests; `up` workers must be used by all of them."""

    stack: Stack
    listed: list[StackProcess] = field(default_factory=list)
    up: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    num_done: int = 0
    num_samples: int = 0

    async def ask_forever(self, seed: int) -> None:
        """Stream answers, each from one of the listed routers, and note whatever is not a whole answer."""
        chance = random.Random(seed)
        async with httpx.AsyncClient(trust_env=False, timeout=STEP_S) as client:
            while True:
                router = chance.choice(self.listed)
                prompt = [chance.randrange(256) for _ in range(chance.randint(20, 300))]
                body = {"prompt": prompt, "max_tokens": chance.randint(1, 80), "ignore_eos": True, "stream": True}
                try:
                    reply = await client.post(f"{router.http_url}/v1/completions", json=body)
                    if reply.status_code != 200 or '"error"' in reply.text or not reply.text.endswith("[DONE]\n\n"):
                        self.failures.append(f"{router.name}: {reply.status_code} {reply.text[-300:]}")
                except httpx.TransportError as error:
                    self.failures.append(f"{router.name}: {error!r}")
                self.num_done += 1
                await asyncio.sleep(0.02)

    async def watch_forever(self) -> None:
        """Note each worker that is up but that a listed router does not use, alone or in a pair."""
        while True:
            for router in list(self.listed):
                up = set(self.up)
                missing = {name: why for name, why in (await self.unused(router)).items() if name in up & self.up}
                if missing and router in self.listed:
                    self.failures.append(f"{router.name} does not use {missing}")
                self.num_samples += 1
            await asyncio.sleep(0.1)

    async def unused(self, router: StackProcess) -> dict[str, str]:
        """Workers that a router does not use, and why. An older router gives no reason for an unpaired one."""
        async with httpx.AsyncClient(trust_env=False, timeout=STEP_S, base_url=router.http_url) as client:
            workers = (await client.get("/load")).json()["workers"]
            metrics = (await client.get("/metrics")).text
        found = {worker.name: "unknown" for worker in self.stack.workers()}
        for one in workers:
            if one["state"] == "ready" and not one["reason"]:
                found.pop(one["worker_id"], None)
            else:
                found[one["worker_id"]] = f"{one['state']}: {one['reason']}"
        lines = [line for line in metrics.splitlines() if line.startswith("diptych_unpaired_workers{")]
        unpaired = [line for line in lines if not line.endswith(" 0.0")]
        return {worker.name: str(unpaired) for worker in self.stack.workers()} if unpaired else found

    async def replace(self, process: StackProcess, *, old: bool) -> None:
        """Replace a process by one of the other version, as an orchestrator does: after a drain."""
        if process.role == "router":
            self.listed.remove(process)
        self.up.discard(process.name)
        await asyncio.to_thread(process.terminate)
        await asyncio.to_thread(process.wait, time.monotonic() + STEP_S)
        set_version(process, old=old)
        await asyncio.to_thread(self.stack.restart, process)
        await self.settle(process)

    async def settle(self, process: StackProcess) -> None:
        """Wait until a router is ready, or until all listed routers use a worker."""
        async with asyncio.timeout(STEP_S), httpx.AsyncClient(trust_env=False, timeout=STEP_S) as client:
            if process.role != "router":
                while any([process.name in await self.unused(router) for router in self.listed]):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)  # the routers are other processes
                self.up.add(process.name)
                return
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(f"{process.http_url}/ready")).status_code == 200:
                        break
                await asyncio.sleep(0.02)
        self.listed.append(process)

    async def roll(self, role: str, *, old: bool) -> None:
        for process in [one for one in self.stack.everything if one.role == role]:
            await self.replace(process, old=old)


@contextlib.asynccontextmanager
async def upgrade(folder: Path, old: Sequence[str], *, num: int = 2) -> AsyncIterator[Upgrade]:
    """A stack of `num` processes of each role, of which the `old` roles have the previous version."""
    stack = make_stack(folder, num, num, routers=num, router_flags=("--local-prefill-threshold", "0"))
    file = folder / "workers.json"
    for router in stack.routers:
        router.command += ["--discovery", "file", "--discovery-file", str(file)]
    stack._start_router = lambda router: router.start(env=stack._env)  # type: ignore[method-assign]
    for process in stack.everything:
        set_version(process, old=process.role in old)
    try:
        for worker in stack.workers():
            worker.start(env=stack._env)
        for worker in stack.workers():
            await asyncio.to_thread(worker.wait_for_addresses, time.monotonic() + STEP_S)
        pools = {role: [one.addresses["address"] for one in stack.workers(role)] for role in ("prefill", "decode")}
        file.write_text(json.dumps(pools))
        rolled = Upgrade(stack)
        for router in stack.routers:
            router.start(env=stack._env)
            await rolled.settle(router)
        for worker in stack.workers():
            await rolled.settle(worker)
        yield rolled
    finally:
        await asyncio.to_thread(stack.stop)


@pytest.mark.slow_except("prefill")
@pytest.mark.parametrize("old", ["prefill", "decode", "router", "prefill decode", "router decode", "router prefill"])
async def test_prompts_are_computed_by_workers_of_the_other_version(old: str, tmp_path: Path, forge: None) -> None:
    async with upgrade(tmp_path, old.split(), num=1) as rolled:
        (router,) = rolled.stack.routers
        async with httpx.AsyncClient(trust_env=False, timeout=STEP_S) as client:
            body = {"prompt": list(range(100)), "max_tokens": 9}
            reply = await client.post(f"{router.http_url}/v1/completions", json=body)
        assert reply.status_code == 200
        placed = {
            kind: sum(await asyncio.to_thread(samples, router, "diptych_placements", f'kind="{kind}"'))
            for kind in ("remote", "local")
        }
        assert placed == {"remote": 1, "local": 0}
        assert await rolled.unused(router) == {}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
async def test_an_upgrade_in_any_order_and_back_loses_nothing(
    order: tuple[str, ...], tmp_path: Path, forge: None
) -> None:
    async with upgrade(tmp_path, ("router", "prefill", "decode")) as rolled:
        tasks = [asyncio.create_task(rolled.ask_forever(seed)) for seed in range(NUM_CLIENTS)]
        tasks.append(asyncio.create_task(rolled.watch_forever()))
        for old in (False, True):
            for role in order:
                await rolled.roll(role, old=old)
        num_done, num_samples = rolled.num_done, rolled.num_samples
        for task in tasks:
            task.cancel()
        ended: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended
    print(f"{'-'.join(order)}: {num_done} streams, {num_samples} samples, {len(rolled.failures)} failures")
    assert not rolled.failures, f"{len(rolled.failures)} of {num_done}: {rolled.failures[:5]}"
    assert num_done > 10 * NUM_CLIENTS and num_samples > 20

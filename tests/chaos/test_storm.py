"""Workers are killed, frozen, ended and given other roles at random under load.

Every stream goes on, and says what it would have said.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import pytest
import zmq
import zmq.asyncio
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.stack import Stack, StackProcess
from common.wire.codec import decode, encode
from common.wire.messages import ChangeRole, Message, RouterHello, WorkerHeartbeat, WorkerHello

from .streams import Ask, Client, Heard, answers, difference, plan
from .watch import POLL_S, counter, is_ready, memory_mib, settle

# Orders to change roles, given to a worker by one more router that it knows: the test.

GREET_MS = 500
"""A worker that was frozen has forgotten its routers, and says nothing until it is greeted again."""
ANSWER_S = 90.0


class Orders:
    """The control connection to one worker."""

    def __init__(self, worker: StackProcess, socket: zmq.asyncio.Socket) -> None:
        self._worker, self._socket = worker, socket
        self._hello = RouterHello(router_id="storm", epoch=time.monotonic_ns())
        self._has_drained = False

    async def change(self, role: str) -> None:
        """Order a change, and wait until the worker has begun it."""
        await self._tell(self._hello)
        await self._tell(ChangeRole(role="prefill" if role == "prefill" else "decode", reason="a storm"))
        await self._until(role, has_begun=True)

    async def obeyed(self, role: str) -> bool:
        """Wait for the end of a change; False when the worker stayed what it was, because requests were left."""
        return await self._until(role, has_begun=False)

    async def _until(self, role: str, *, has_begun: bool) -> bool:
        """Whether the worker has the role, at the end of its drain or once it drains."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            self._worker.check(deadline, f"did not say whether it became a {role} worker")
            if not await self._socket.poll(GREET_MS):
                await self._tell(self._hello)
                continue
            message = decode(await self._socket.recv())
            if isinstance(message, WorkerHello) and message.role == role:
                return True
            if isinstance(message, WorkerHeartbeat):
                self._has_drained |= message.draining
                if self._has_drained and message.draining == has_begun:
                    return False

    async def _tell(self, message: Message) -> None:
        await self._socket.send(encode(message))


@asynccontextmanager
async def orders_to(worker: StackProcess) -> AsyncIterator[Orders]:
    """A connection that ends with the block."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(worker.addresses["address"])
        yield Orders(worker, socket)


BACK_TIMEOUT_S = 90.0
DRAIN_TIMEOUT_S = 60.0
AMID_S = 0.5
"""After the order, in which a worker dies or is frozen: a change takes about half of that."""
ACTS = {"kill": 3, "drain": 3, "freeze": 2, "nap": 1, "forget": 1}
"""The faults of workers, by how often they come."""
ROLE_ACTS = ACTS | {"change": 5, "change, kill": 2, "change, freeze": 1}
"""Those of workers that may change their roles: a change alone, and one during which the worker dies or is frozen."""


@dataclass(frozen=True)
class Answered:
    """The answer to the `index`-th ask of a plan."""

    index: int
    router: str
    heard: Heard


@dataclass
class Load:
    """Keeps `at_once` streams of a plan in flight, spread over all routers, until told to stop."""

    stack: Stack
    asks: Sequence[Ask]
    at_once: int
    answered: list[Answered] = field(default_factory=list)
    num_running: int = 0
    num_asked_again: int = 0

    async def run(self, until: float) -> None:
        """Ends when the streams that were begun before `until` (monotonic seconds) have ended."""
        names = [router.name for router in self.stack.routers]
        turns = iter(range(10**9))

        async def lane() -> None:
            while time.monotonic() < until:
                turn = next(turns)
                index, router = turn % len(self.asks), names[turn % len(names)]
                # Every other round is new to the prefix caches.
                salt = f"round {turn // len(self.asks)}" if turn % 2 else ""
                self.num_running += 1
                heard = await self._ask(clients, router, self.asks[index], salt)
                self.num_running -= 1
                self.answered.append(Answered(index, router, heard))

        async with AsyncExitStack() as closing:
            clients = {
                router.name: await closing.enter_async_context(Client(router.http_url)) for router in self.stack.routers
            }
            async with asyncio.TaskGroup() as lanes:
                for _ in range(self.at_once):
                    lanes.create_task(lane())

    async def _ask(self, clients: Mapping[str, Client], router: str, ask: Ask, salt: str) -> Heard:
        return await clients[router].ask(ask, salt=salt)

    def problems(self, expected: Sequence[Heard]) -> list[str]:
        """Every answer that is not the undisturbed one."""
        return [
            f"ask {one.index} at {one.router}: {why}"
            for one in self.answered
            if (why := difference(one.heard, expected[one.index]))
        ]


@dataclass(frozen=True)
class Act:
    """One blow to a worker. Times are seconds after the storm's begin; `back_s`: until it was ready again."""

    at_s: float
    worker: str
    what: str
    back_s: float

    def __str__(self) -> str:
        return f"{self.at_s:5.1f} s: {self.what} {self.worker}, well again after {self.back_s:.1f} s"


class Storm:
    """Disturbs workers at random, several at once, but never the last decode worker that is well."""

    back_s = BACK_TIMEOUT_S

    def __init__(
        self, stack: Stack, seed: int, *, every_s: tuple[float, float] = (2.0, 5.0), acts: Mapping[str, int] = ACTS
    ) -> None:
        """`acts`: what may be done to a worker, by how often it comes.

        What is done, and when, depends on the seed alone; to which worker also on how the others fare.
        """
        self._stack, self._every_s, self._what = stack, every_s, dict(acts)
        self._random, self._plan = random.Random(seed), random.Random(f"{seed}/plan")
        self._unwell: set[str] = set()
        self._roles = {worker.name: worker.role for worker in stack.workers()}
        self.began_at = 0.0
        self.acts: list[Act] = []
        self.exit_codes: Counter[int | None] = Counter()
        self.drains_s: list[float] = []
        self.changes: Counter[str] = Counter()

    async def run(self, until: float) -> None:
        """Ends when every worker that was disturbed before `until` (monotonic seconds) is ready again."""
        self.began_at = time.monotonic()
        async with asyncio.TaskGroup() as acts:
            while True:
                await asyncio.sleep(self._plan.uniform(*self._every_s))
                if time.monotonic() >= until:
                    break
                choice = self._choose()
                if choice is not None:
                    self._unwell.add(choice[0].name)
                    acts.create_task(self._act(*choice))

    def _choose(self) -> tuple[StackProcess, str] | None:
        well = [worker for worker in self._stack.workers() if worker.name not in self._unwell]
        decode = [worker for worker in well if self._roles[worker.name] == "decode"]
        open_to_harm = [worker for worker in well if worker not in decode or len(decode) > 1]
        (what,) = self._plan.choices(list(self._what), weights=list(self._what.values()))
        return (self._random.choice(open_to_harm), what) if open_to_harm else None

    async def _act(self, worker: StackProcess, what: str) -> None:
        began = time.monotonic()
        await self._do(worker, what)
        await self._until_ready(worker)
        now = time.monotonic()
        self.acts.append(Act(began - self.began_at, worker.name, what, now - began))
        self._unwell.discard(worker.name)

    async def _do(self, worker: StackProcess, what: str) -> None:
        began = time.monotonic()
        match what:
            case "kill":
                await self._kill(worker)
            case "drain":
                worker.send_signal(signal.SIGTERM)
                await asyncio.to_thread(worker.wait, time.monotonic() + DRAIN_TIMEOUT_S)
                self.exit_codes[worker.returncode] += 1
                self.drains_s.append(time.monotonic() - began)
                await self._restart(worker)
            case "freeze" | "nap":  # longer than any limit for a silent worker, and shorter
                await self._freeze(worker, self._random.uniform(3.0, 5.0) if what == "freeze" else 0.4)
            case "change" | "change, kill" | "change, freeze":
                await self._change(worker, what.rpartition(" ")[2])
            case "forget":
                async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
                    await client.post(f"{self._random.choice(self._stack.routers).http_url}/reset_prefix_cache")

    async def _kill(self, worker: StackProcess) -> None:
        await asyncio.to_thread(worker.kill)
        await asyncio.sleep(self._random.uniform(0.1, 2.0))
        await self._restart(worker)

    async def _freeze(self, worker: StackProcess, seconds: float) -> None:
        worker.pause()
        await asyncio.sleep(seconds)
        worker.resume()

    async def _change(self, worker: StackProcess, then: str) -> None:
        """Give a worker the other role; `then` kill or freeze it at some moment of the change, or shortly after it."""
        role = "prefill" if self._roles[worker.name] == "decode" else "decode"
        async with orders_to(worker) as orders:
            await orders.change(role)
            if then != "change":
                await asyncio.sleep(self._random.uniform(0.0, AMID_S))
            if then == "kill":
                self.changes["died"] += 1
                await self._kill(worker)
                return
            if then == "freeze":
                await self._freeze(worker, self._random.uniform(3.0, 5.0))
            if await orders.obeyed(role):
                self._roles[worker.name] = role
                self.changes[f"to {role}"] += 1
            else:
                self.changes["stayed"] += 1

    async def _restart(self, worker: StackProcess) -> None:
        """A worker starts in the role that it is at home in."""
        await asyncio.to_thread(self._stack.restart, worker)
        self._roles[worker.name] = worker.role

    async def _until_ready(self, worker: StackProcess) -> None:
        deadline = time.monotonic() + self.back_s
        while not await is_ready(worker):
            worker.check(deadline, "was not ready again")
            await asyncio.sleep(POLL_S)


def longest_gaps(answered: Sequence[Answered]) -> list[tuple[float, float]]:
    """The longest silence between two tokens of each stream and when it ended (monotonic seconds), longest first."""
    heard = [one.heard.tokens_at for one in answered]
    return sorted((max((b - a, b) for a, b in pairwise(times)) for times in heard if len(times) > 1), reverse=True)


def summary(load: Load, storm: Storm, counters: dict[str, float]) -> list[tuple[str, Any]]:
    """The closing table."""
    heard = [one.heard for one in load.answered]
    silences = longest_gaps(load.answered)
    longest_s, ended_at = silences[0]
    first = sorted(one.ttft_s for one in heard if one.tokens_at)
    num_complete, num_left = sum(one.complete for one in heard), sum(one.left for one in heard)
    return [
        ("streams", f"{len(heard)}: {num_complete} finished, {num_left} left"),
        ("streams that were asked for again", load.num_asked_again),
        ("tokens", sum(len(one.token_ids) for one in heard)),
        ("longest gap between two tokens", f"{longest_s:.2f} s, until {ended_at - storm.began_at:.0f} s"),
        ("longest gaps of streams", ", ".join(f"p{q} {_quantile(silences, q):.2f} s" for q in (99, 95, 90, 50))),
        ("first token", f"median {first[len(first) // 2] * 1000:.0f} ms, longest {first[-1]:.2f} s"),
        ("done to workers", "\n".join(str(act) for act in sorted(storm.acts, key=lambda act: act.at_s))),
        ("changes of roles", ", ".join(f"{what}: {count} times" for what, count in storm.changes.items()) or "none"),
        ("status after SIGTERM", ", ".join(f"{code}: {count} times" for code, count in storm.exit_codes.items())),
        ("from SIGTERM to the end", ", ".join(f"{seconds:.1f} s" for seconds in sorted(storm.drains_s))),
        *((name, f"{value:g}") for name, value in counters.items()),
    ]


def _quantile(longest_first: Sequence[tuple[float, float]], percent: int) -> float:
    return longest_first[len(longest_first) * (100 - percent) // 100][0]


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


async def undisturbed(stack: Stack, asks: Sequence[Ask]) -> list[Heard]:
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
    asks: Sequence[Ask] = (),
    new_load: type[Load] = Load,
    new_storm: type[Storm] = Storm,
) -> Storm:
    """The whole experiment: what should come, the storm, what came, and what is left behind."""
    asks = asks or plan(seed, num_asks)
    expected = await undisturbed(stack, asks)
    load, storm = new_load(stack, asks, at_once), new_storm(stack, seed, every_s=every_s, acts=acts)
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

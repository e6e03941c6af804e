"""Processes in network namespaces: cables that are cut, for a moment or for good, and cables that are slow."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from benchmarks.stack import Place, Stack

from .streams import Ask, Client, Heard, answers, difference, plan
from .watch import is_ready, settle

BRIDGE_HOST = 1
IP_TIMEOUT_S = 10.0
NOBODY = "02:00:00:00:00:01"
"""A hardware address that no interface has."""


class NetworkError(Exception):
    """The kernel or our rights do not allow it."""


def ip(*arguments: str) -> None:
    """Run iproute2's `ip`. Raises NetworkError."""
    run("ip", *arguments)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=IP_TIMEOUT_S)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")


class Network:
    """A network of namespaces on this machine, one for each process. A context manager that removes all of it.

    host ── bridge ──┬── router          The host has the bridge's address: clients and probes run there.
                     ├── prefill-0
                     └── decode-0 ...

    `hosts` are the names of the processes.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._tag = f"d{os.getpid() % 100000}"
        self._subnet = f"10.231.{os.getpid() % 200 + 1}"
        self._hosts = {name: index for index, name in enumerate(hosts, start=BRIDGE_HOST + 1)}
        self.places = {
            name: Place(("ip", "netns", "exec", self._namespace(name)), self.address(name)) for name in hosts
        }

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def address(self, name: str) -> str:
        return f"{self._subnet}.{self._hosts[name]}"

    @contextmanager
    def cut(self, name: str) -> Iterator[None]:
        """A process's cable is out for as long as the context lasts."""
        ip("link", "set", self._cable(name), "down")
        try:
            yield
        finally:
            ip("link", "set", self._cable(name), "up")

    @contextmanager
    def cut_between(self, one: str, other: str) -> Iterator[None]:
        """Two processes cannot reach each other; what they send is lost without a word."""
        pairs = ((one, other), (other, one))
        for here, there in pairs:
            self._neighbour(here, there, "replace", "lladdr", NOBODY, "nud", "permanent")
        try:
            yield
        finally:
            for here, there in pairs:
                self._neighbour(here, there, "del")

    @contextmanager
    def slow(self, name: str, *, rate: str, queue_ms: float) -> Iterator[None]:
        """A process's cable carries `rate` only, both ways; what would wait for longer than `queue_ms` is lost."""
        bucket = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", f"{queue_ms:g}ms")
        ends = (("-n", self._namespace(name), "qdisc", "{}", "dev", "eth0"), ("qdisc", "{}", "dev", self._cable(name)))
        for end in ends:
            run("tc", *(part.format("add") for part in end), *bucket)
        try:
            yield
        finally:
            for end in ends:
                run("tc", *(part.format("del") for part in end), "root")

    # ------------------------------------------------------------ inside

    def _namespace(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _cable(self, name: str) -> str:
        return f"{self._tag}v{self._hosts[name]}"

    def _bridge(self) -> str:
        return f"{self._tag}br"

    def _neighbour(self, here: str, there: str, *what: str) -> None:
        action, *rest = what
        ip("-n", self._namespace(here), "neigh", action, self.address(there), *rest, "dev", "eth0")

    def _build(self) -> None:
        ip("link", "add", self._bridge(), "type", "bridge")
        ip("addr", "add", f"{self._subnet}.{BRIDGE_HOST}/24", "dev", self._bridge())
        ip("link", "set", self._bridge(), "up")
        for name in self._hosts:
            namespace, cable = self._namespace(name), self._cable(name)
            ip("netns", "add", namespace)
            ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            ip("link", "set", cable, "master", self._bridge(), "up")
            ip("-n", namespace, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")
            ip("-n", namespace, "link", "set", "lo", "up")

    def _remove(self) -> None:
        """Parts that were not built are not there to be removed. Cables would go with their namespaces, but later."""
        cables = [("link", "del", self._cable(name)) for name in self._hosts]
        namespaces = [("netns", "del", self._namespace(name)) for name in self._hosts]
        for one in (*cables, *namespaces, ("link", "del", self._bridge())):
            subprocess.run(("ip", *one), capture_output=True, timeout=IP_TIMEOUT_S)


def why_not() -> str:
    """Why this machine cannot have such a network; "" when it can."""
    if not (shutil.which("ip") and shutil.which("tc")):
        return "iproute2 is not installed"
    try:
        with (
            Network(("a", "b")) as network,
            network.cut_between("a", "b"),
            network.slow("a", rate="1mbit", queue_ms=10),
        ):
            pass
    except (NetworkError, OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ""


pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

LIMIT_S = 2.0
MOMENT_S, LONG_S = 0.7, 3 * LIMIT_S
BACK_S = 60.0
NAMES = ("router", "prefill-0", "decode-0", "decode-1")
FLAGS = ("--kv-transport", "tcp", "--router-timeout-s", str(2 * LIMIT_S))


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if reason := why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    with Network(NAMES) as built:
        yield built


@pytest.fixture(scope="module")
def shared_stack(network: Network, stacks: Any) -> Iterator[Stack]:
    stack = stacks(
        1,
        2,
        places=network.places,
        worker_flags=FLAGS,
        prefill_flags=("--kv-lease-s", str(LIMIT_S)),
        decode_flags=("--transfer-timeout-s", str(LIMIT_S)),
        router_flags=("--worker-timeout-s", str(LIMIT_S), "--local-prefill-threshold", "0"),
    )
    yield stack
    stack.stop()  # before its network


@pytest.fixture
async def stack(shared_stack: Stack) -> AsyncIterator[Stack]:
    """Afterwards every worker is back and no request holds anything."""
    yield shared_stack
    deadline = time.monotonic() + BACK_S
    for worker in shared_stack.workers():
        while not await is_ready(worker):
            worker.check(deadline, "is not ready after its cable was put back")
            await asyncio.sleep(0.1)
    await asyncio.to_thread(shared_stack.wait_ready, deadline)
    await settle(shared_stack, BACK_S)


def asks() -> list[Ask]:
    return [Ask({**ask.body, "max_tokens": 150, "ignore_eos": True, "stop": None}) for ask in plan(21, 12)]


async def undisturbed(stack: Stack) -> list[Heard]:
    async with Client(stack.url) as client:
        return await answers(client, asks(), salt="undisturbed")


async def asked_during(stack: Stack, trouble: AbstractContextManager[None], seconds: float, salt: str) -> list[Heard]:
    """Answers to two rounds of asks: one whose streams run when the trouble begins, one that begins amid it."""
    async with Client(stack.url) as client, asyncio.TaskGroup() as tasks:
        early = [tasks.create_task(client.ask(ask, salt=f"{salt} 1")) for ask in asks()]
        await asyncio.sleep(0.3)  # streams are under way; the outcome does not depend on how far
        with trouble:
            late = [tasks.create_task(client.ask(ask, salt=f"{salt} 2")) for ask in asks()]
            await asyncio.sleep(seconds)
        return [await task for task in (*early, *late)]


def check(heard: list[Heard], expected: list[Heard]) -> None:
    problems = [difference(one, should) for one, should in zip(heard, (*expected, *expected), strict=True)]
    assert not any(problems), [problem for problem in problems if problem]


@pytest.mark.parametrize("seconds", [MOMENT_S, LONG_S], ids=["for a moment", "for long"])
@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
async def test_a_cut_cable(stack: Stack, network: Network, name: str, seconds: float) -> None:
    """Router and the other pool are both out of reach."""
    expected = await undisturbed(stack)
    heard = await asked_during(stack, network.cut(name), seconds, f"cut {name} {seconds}")
    check(heard, expected)


@pytest.mark.parametrize("seconds", [MOMENT_S, LONG_S], ids=["for a moment", "for long"])
@pytest.mark.parametrize("ends", [("router", "decode-0"), ("router", "prefill-0"), ("prefill-0", "decode-0")])
async def test_two_that_cannot_reach_each_other(
    stack: Stack, network: Network, ends: tuple[str, str], seconds: float
) -> None:
    expected = await undisturbed(stack)
    heard = await asked_during(stack, network.cut_between(*ends), seconds, f"between {ends} {seconds}")
    check(heard, expected)


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
async def test_a_slow_cable(stack: Stack, network: Network, name: str) -> None:
    expected = await undisturbed(stack)
    heard = await asked_during(stack, network.slow(name, rate="10mbit", queue_ms=30), LONG_S, f"slow {name}")
    check(heard, expected)

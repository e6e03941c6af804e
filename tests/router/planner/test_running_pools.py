"""Routers that start, crash, roll and take over beside pools under load: virtual time, a real API server over HTTP."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from common.config import RouterConfig
from common.latency.step_model import StepModel, StepShape
from router.fleet.booking import Booking
from router.fleet.registry import WorkerRegistry
from router.planner.kubernetes_scaler import KubernetesScaler
from router.planner.loop import PlanLoop
from router.planner.offered_load import LoadWindow, SampledRequest
from router.planner.pool import MOST_START_S

from ...fake_worker import heartbeat_of, hello_of
from ...kubernetes_api import KubernetesAPI

MODEL = StepModel(fixed_s=0.004, floor_s=0.008, token_s=4e-5, row_s=3e-5, num_steps=99)
REQUEST = SampledRequest(800, 0, 200)
RATE, ANSWER_S = 100.0, 5.0
INTERVAL_S, WINDOW_S = 5.0, MOST_START_S
NEED = {"p": 5, "d": 4}
"""The pools that a router settles on at `RATE`."""


@dataclass
class Router:
    """A router's plan loop with the workers and load that it sees."""

    cluster: Cluster
    share: float
    hello_s: float
    settings: dict[str, Any]
    is_leaving: bool = False
    bookings: dict[str, list[Booking]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cluster = self.cluster
        self.began, self.listed_at, self.held = cluster.now, math.inf, {"prefill": 0, "decode": 0}
        self.registry, self.window = WorkerRegistry([], [], worker_timeout_s=60.0), LoadWindow()
        config = RouterConfig(
            decode=("tcp://d:1",), planner="kubernetes", prefill_deployment="p", decode_deployment="d",
            kubernetes_api=cluster.api.url, kubernetes_credentials=str(cluster.api.folder),
            slo_ttft_ms=400.0, slo_tpot_ms=40.0, max_prefill=12, max_decode=12, **self.settings,
        )  # fmt: skip
        scaler = KubernetesScaler.of(config)
        scaler._lease._clock = lambda: cluster.now
        self.client = scaler._client
        self.loop = PlanLoop(
            config,
            self.window,
            lambda: self.registry.workers.values(),
            lambda: self.held,
            scaler,
            is_listed=lambda: cluster.now >= self.listed_at,
            clock=lambda: cluster.now,
        )
        self.loop.is_leaving = lambda: self.is_leaving

    def see(self) -> None:
        """Follow the workers of the cluster, and take this router's share of the load of the last interval."""
        cluster, now = self.cluster, self.cluster.now
        known = self.registry.workers
        if now < self.listed_at:
            return
        for address in known.keys() - cluster.workers.keys():
            self.registry.remove(address)
            self.bookings.pop(address, None)
        for address, ready_at in cluster.workers.items():
            role = "prefill" if address.startswith("tcp://p") else "decode"
            if address not in known:
                self.registry.add(address, role)
            if now >= max(ready_at, self.listed_at + self.hello_s):
                if known[address].hello is None:
                    identity = {"block_size": 16, "max_step_tokens": 512, "num_blocks": 25_000, "max_num_seqs": 128}
                    self.registry.on_hello(address, hello_of(address[6:], role, **identity), now)
                num = cluster.num_running(role)
                self._book(address, num * self.share)
                serial = max((booking.serial for booking in self.bookings[address]), default=0)
                beat = heartbeat_of(
                    address[6:], step_model=MODEL, step=round(now), num_running=num, serial=serial, num_owned_blocks=num
                )
                self.registry.on_heartbeat(address, beat, now)
        if cluster.rate and self.share:
            self.window.arrived(now - INTERVAL_S / 2, round(cluster.rate * INTERVAL_S * self.share))
            for _ in range(8):
                self.window.ended(REQUEST, now)

    def _book(self, address: str, num: float) -> None:
        own = self.bookings.setdefault(address, [])
        while len(own) < round(num):
            own.append(self.registry.book(address, self.cluster.now, prompt=StepShape(), num_blocks=1))
        while len(own) > round(num):
            self.registry.release(own.pop())


class Cluster:
    """Deployments `p` and `d`. A new worker is ready after `start_s`."""

    def __init__(self, api: KubernetesAPI, start_s: float = 40.0) -> None:
        self.api, self.start_s, self.now, self.rate = api, start_s, 1000.0, RATE
        self.workers: dict[str, float] = {}
        self.routers: list[Router] = []
        self.history: list[tuple[float, dict[str, int]]] = []

    def router(self, share: float = 1.0, list_s: float = 3.0, hello_s: float = 4.0, **settings: Any) -> Router:
        """Start a router that lists the workers after `list_s`, and has their hellos after another `hello_s`."""
        made = Router(self, share, hello_s, settings)
        made.listed_at = self.now + list_s
        self.routers.append(made)
        return made

    def num_running(self, role: str) -> int:
        num = sum(at <= self.now and address.startswith("tcp://d") for address, at in self.workers.items())
        return round(self.rate * ANSWER_S / num) if role == "decode" and num else 0

    async def run(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        """Let time pass, a plan of each router every `INTERVAL_S`."""
        end = self.now + seconds
        while self.now < end:
            self._follow()
            each()
            for router in self.routers:
                router.see()
                await router.loop.round()
            self._note()
            self.now += INTERVAL_S

    async def crash(self, router: Router) -> None:
        """Kill a router: it neither releases the lease nor says goodbye."""
        self.routers.remove(router)
        await router.client.close()

    async def close(self) -> None:
        for router in self.routers:
            await router.client.close()

    @property
    def holder(self) -> str:
        """The router that leads."""
        return self.api.leases["diptych-planner"]["spec"]["holderIdentity"]

    def least(self, name: str, since: float = 0.0, until: float = math.inf) -> int:
        return min(sizes[name] for at, sizes in self.history if since <= at < until)

    def most(self, name: str, since: float = 0.0) -> int:
        return max(sizes[name] for at, sizes in self.history if at >= since)

    def _follow(self) -> None:
        for name, num in self.api.replicas.items():
            stuck = self.api.unschedulable.get(name, 0)
            own = [address for address in self.workers if address.startswith(f"tcp://{name}")]
            for address in own[num - stuck :]:
                del self.workers[address]
            for _ in range(num - stuck - len(own)):
                number = next(n for n in range(99) if f"tcp://{name}{n}:1" not in self.workers)
                self.workers[f"tcp://{name}{number}:1"] = self.now + (
                    self.start_s if self.routers and self.history else 0.0
                )

    def _note(self) -> None:
        if not self.history or self.history[-1][1] != self.api.replicas:
            self.history.append((self.now, dict(self.api.replicas)))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    api = KubernetesAPI(tmp_path / "serviceaccount").start()
    api.replicas = dict(NEED)
    made = Cluster(api)
    yield made
    await made.close()
    api.stop()


async def test_a_start_leaves_running_pools_as_they_are(cluster: Cluster) -> None:
    cluster.api.replicas = {"p": 7, "d": 9}
    cluster.router()
    await cluster.run(60.0)
    assert cluster.api.patches == [], "no window of load has been seen"


@pytest.mark.slow
async def test_after_a_window_of_load_a_start_leaves_what_the_load_needs(cluster: Cluster) -> None:
    cluster.api.replicas, began = {"p": 15, "d": 9}, cluster.now
    cluster.router(max_cost=16.0)
    await cluster.run(WINDOW_S + 60.0)
    assert cluster.least("p", until=began + WINDOW_S) == 15, "neither bounds nor budget make it smaller before"
    assert cluster.api.replicas == NEED


async def test_a_crash_under_load_leaves_the_pools_as_they_are(cluster: Cluster) -> None:
    first = cluster.router()
    await cluster.run(30.0)
    holder = cluster.holder
    await cluster.crash(first)
    cluster.router()  # in the same pod
    await cluster.run(15.0)
    assert cluster.holder == holder, "it is not taken for the router that held the lease"
    await cluster.run(45.0)
    assert cluster.holder != holder and cluster.api.patches == []


@pytest.mark.slow
async def test_a_rollout_leaves_the_pools_as_they_are(cluster: Cluster) -> None:
    """The new router starts, the old one drains for two minutes while its clients go to the new one."""
    old = cluster.router()
    await cluster.run(WINDOW_S + 20.0)
    new, holder = cluster.router(share=0.0), cluster.holder
    await cluster.run(30.0)
    old.is_leaving = True

    def shift() -> None:
        old.share = 0.7 * old.share if old.share > 0.02 else 0.0
        new.share = 1.0 - old.share

    await cluster.run(120.0, shift)
    assert cluster.holder != holder, "a router that drains does not lead"
    await cluster.crash(old)
    await cluster.run(WINDOW_S)
    assert all(NEED[name] <= cluster.least(name) and cluster.most(name) <= NEED[name] + 1 for name in NEED)
    assert cluster.api.replicas == NEED


@pytest.mark.slow
@pytest.mark.parametrize("share", (0.0, 0.2), ids=("no traffic", "a fifth of the traffic"))
async def test_a_leader_with_a_part_of_the_load_keeps_the_pools(cluster: Cluster, share: float) -> None:
    """The others have no right to scale: the first of the routers leads."""
    cluster.router(share=share)
    await cluster.run(WINDOW_S + 200.0)
    assert all(cluster.least(name) >= NEED[name] for name in NEED)


@pytest.mark.slow
@pytest.mark.parametrize("size", (1, 9), ids=("too small", "too large"))
async def test_a_leader_without_load_lets_a_router_with_load_lead(cluster: Cluster, size: int) -> None:
    """All clients keep their connections to the other router."""
    cluster.api.replicas = {"p": size, "d": size}
    idle, _ = cluster.router(share=0.0), cluster.router()
    await cluster.run(20.0)
    assert idle.loop._scaler and idle.loop._deployed.term is not None
    await cluster.run(WINDOW_S + 200.0)
    assert idle.loop._deployed.term is None and cluster.api.replicas == NEED


@pytest.mark.slow
async def test_a_router_that_takes_over_keeps_the_pools(cluster: Cluster) -> None:
    """It has run for long, without traffic, and has its own idea of the pools."""
    first, second = cluster.router(share=1.0), cluster.router(share=0.0, min_prefill=1)
    await cluster.run(WINDOW_S + 20.0)
    await cluster.crash(first)
    second.share = 1.0
    await cluster.run(WINDOW_S + 100.0)
    assert all(cluster.least(name) >= NEED[name] for name in NEED) and cluster.api.replicas == NEED


@pytest.mark.slow
async def test_idle_pools_sleep_after_the_window_and_wake_at_once(cluster: Cluster) -> None:
    cluster.rate, began = 0.0, cluster.now
    router = cluster.router(min_prefill=0, min_decode=0)
    await cluster.run(WINDOW_S + 30.0)
    assert cluster.least("d", until=began + WINDOW_S) == NEED["d"] and cluster.api.replicas == {"p": 0, "d": 0}
    await cluster.crash(router)
    again = cluster.router(min_prefill=0, min_decode=0)
    again.held["decode"] = 1
    await cluster.run(30.0)
    assert cluster.api.replicas == {"p": 0, "d": 1}, "a restarted router wakes a pool before its window has passed"


async def test_a_router_that_does_not_lead_wakes_a_sleeping_pool(cluster: Cluster) -> None:
    cluster.api.replicas, cluster.rate = {"p": 0, "d": 0}, 0.0
    bounds = {"min_prefill": 0, "min_decode": 0}
    leader, other = cluster.router(share=0.0, **bounds), cluster.router(share=0.0, **bounds)
    other.held["decode"] = 9
    await cluster.run(15.0)
    assert leader.loop.outlook and not leader.loop.outlook.fleet.num_held["decode"], "the leader knows no request"
    assert cluster.api.patches == [("d", {"spec": {"replicas": 1}})]


@pytest.mark.slow
async def test_a_start_while_the_api_server_is_away(cluster: Cluster) -> None:
    cluster.api.refusal, began = 503, cluster.now
    cluster.router(list_s=60.0)
    await cluster.run(60.0)
    cluster.api.refusal = 0
    await cluster.run(WINDOW_S)
    assert cluster.api.patches == []
    cluster.rate *= 2.0
    await cluster.run(60.0)
    assert cluster.least("p", since=began) == NEED["p"] and cluster.api.replicas["p"] > NEED["p"]


@pytest.mark.slow
async def test_sizes_that_another_party_sets_are_begun_from(cluster: Cluster) -> None:
    cluster.router()
    await cluster.run(WINDOW_S + 30.0)
    cluster.api.replicas = {"p": 8, "d": 2}
    at = cluster.now
    await cluster.run(60.0)
    assert cluster.api.replicas == {"p": 8, "d": NEED["d"]}, "what the load needs grows back, what it does not stays"
    await cluster.run(WINDOW_S)
    assert cluster.least("p", since=at) == NEED["p"]


@pytest.mark.slow
async def test_pods_that_find_no_node_do_not_hold_the_plan_up(cluster: Cluster) -> None:
    cluster.api.replicas, cluster.api.unschedulable = {"p": 7, "d": 6}, {"p": 2}
    cluster.router()
    await cluster.run(60.0)
    assert cluster.api.patches == []
    await cluster.run(WINDOW_S)
    assert cluster.api.replicas == NEED


@pytest.mark.slow
async def test_a_pool_that_is_too_small_grows_before_the_window_has_passed(cluster: Cluster) -> None:
    cluster.api.replicas = {"p": 1, "d": 1}
    cluster.router()
    await cluster.run(60.0)
    assert all(cluster.api.replicas[name] >= NEED[name] for name in NEED)

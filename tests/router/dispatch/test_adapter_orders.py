"""Orders to load adapters that no worker can follow."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import InvalidRequest, Unavailable
from common.wire.messages import FLAG_VERSION, MAX_ADAPTERS, AdapterState
from router.dispatch.adapter_orders import AdapterOrders
from router.fleet.adapters import FleetAdapters
from router.fleet.registry import WorkerRegistry

from ...fake_worker import heartbeat_of, hello_of


async def test_workers_without_places_for_adapters_are_the_askers_matter(cluster):
    dispatcher = await cluster.start()
    with pytest.raises(InvalidRequest, match="none of the 2 ready workers accepts adapters: .*--max-loras"):
        await dispatcher.adapters.load("a", "/adapters/a", in_place=False)


async def test_without_workers_it_is_worth_asking_again(cluster):
    dispatcher = await cluster.start(prefill=0, decode=0)
    with pytest.raises(Unavailable, match="No worker is ready"):
        await dispatcher.adapters.load("a", "/adapters/a", in_place=False)


ONE, OTHER = "1" * 32, "2" * 32


class Fleet:
    """A registry of a prefill and two decode workers with places for adapters, and one without."""

    def __init__(self) -> None:
        self.registry = WorkerRegistry(["p0"], ["d0", "d1", "d2"], worker_timeout_s=60.0)
        self.adapters = FleetAdapters(self.registry)
        for address in self.registry.workers:
            role = "prefill" if address == "p0" else "decode"
            self.registry.on_hello(address, hello_of(address, role, max_loras=0 if address == "d2" else 2), 0.0)
            self.say(address)

    def say(self, address: str, *states: AdapterState) -> list[tuple[str, int, str]]:
        """A heartbeat; the orders that the worker is then sent: name, version, path."""
        beat = heartbeat_of(address, adapters=states)
        self.registry.on_heartbeat(address, beat, 0.0)
        orders = self.adapters.on_heartbeat(beat, self.registry.workers[address].identity.max_loras)
        return [(order.name, order.version, order.path) for order in orders]


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def loaded(version: int = FLAG_VERSION, digest: str = ONE, name: str = "a", path: str = "/a") -> AdapterState:
    return AdapterState(name, version, "loaded", path, digest)


def state(status: Any, version: int, **fields: Any) -> AdapterState:
    return AdapterState("a", version, status, **fields)


def test_a_worker_that_lacks_what_others_have_is_told_to_load_it(fleet: Fleet) -> None:
    assert fleet.say("p0", loaded()) == []
    assert fleet.say("d0") == [("a", FLAG_VERSION, "/a")]
    assert fleet.say("d0", state("loading", FLAG_VERSION, path="/a")) == []
    assert fleet.say("d2") == [], "a worker without places gets an order"


def test_of_two_versions_the_newer_one_counts_even_when_it_stands_for_nothing(fleet: Fleet) -> None:
    fleet.say("p0", loaded(7))
    assert fleet.adapters.has("a")
    assert fleet.say("d0", state("unloaded", 9)) == []
    assert fleet.say("p0", loaded(7)) == [("a", 9, "")]
    assert fleet.say("d1") == [], "a worker that never had it is told to unload it"
    assert not fleet.adapters.has("a") and fleet.adapters.digest_of("a") == ""


def test_orders_are_newer_than_all_that_is_known(fleet: Fleet) -> None:
    fleet.say("p0", loaded(500))
    order = fleet.adapters.order("a", "/b", 400)
    assert (order.version, order.path) == (501, "/b")
    assert fleet.adapters.order("a", "", 900).version == 900


def test_two_files_of_one_version_are_never_mixed(fleet: Fleet) -> None:
    """A name stands for the weights that most workers have; workers with others do not come into question."""
    fleet.say("p0", loaded(digest=ONE))
    fleet.say("d0", loaded(digest=OTHER))
    fleet.say("d1", loaded(digest=OTHER))
    digest = fleet.adapters.digest_of("a")
    assert digest == OTHER
    assert [worker.address for worker in fleet.registry.workers.values() if digest in worker.load.digests] == [
        "d0",
        "d1",
    ]


def test_the_outcome_of_an_order(fleet: Fleet) -> None:
    order = fleet.adapters.order("a", "/a", 5)
    assert set(fleet.adapters.outcome(order).missing) == {"worker p0", "worker d0", "worker d1"}
    fleet.say("p0", loaded(5))
    fleet.say("d0", state("loading", 5, path="/a"))
    fleet.say("d1", state("failed", 5, path="/a", message="no such file"))
    outcome = fleet.adapters.outcome(order)
    assert (outcome.missing, outcome.failures) == (("worker d0",), ("worker d1: no such file",))
    fleet.say("d0", loaded(5))
    outcome = fleet.adapters.outcome(order)
    assert (outcome.missing, outcome.num_loaded, outcome.digest, outcome.superseded) == ((), 2, ONE, False)
    fleet.say("d0", state("unloaded", 6))
    assert fleet.adapters.outcome(order).superseded


def test_weights_are_gone_when_no_worker_has_them_and_no_name_stands_for_them(fleet: Fleet) -> None:
    fleet.say("p0", loaded(5))
    fleet.adapters.digest_of("a")
    fleet.say("p0", state("loading", 5, path="/a"))
    assert not fleet.registry.is_gone(ONE), "a worker that has restarted loads it again"
    fleet.say("p0", state("unloaded", 6))
    assert fleet.registry.is_gone(ONE)


def test_names_tell_what_may_be_asked_for(fleet: Fleet) -> None:
    fleet.say("p0", loaded(5), loaded(3, OTHER, "b", "/b"), AdapterState("c", 4, "loading", "/c"))
    found = [(one.name, one.digest, one.ready) for one in fleet.adapters.names()]
    assert found == [("a", ONE, True), ("b", OTHER, True)]
    assert fleet.adapters.has("c"), "a request for an adapter that is being loaded gets a 404"
    fleet.registry.on_cut("p0")
    assert [one.ready for one in fleet.adapters.names()] == [False, False]


def test_the_number_of_names_is_bounded(fleet: Fleet) -> None:
    for i in range(MAX_ADAPTERS):
        fleet.adapters.order(f"n{i}", "/x", i)
    with pytest.raises(InvalidRequest, match=f"{MAX_ADAPTERS} adapter names"):
        fleet.adapters.order("more", "/x", 999)
    fleet.adapters.order("n3", "", 1000)
    assert fleet.adapters.order("more", "/x", 1001).name == "more"


async def test_an_order_whose_workers_are_all_lost_is_worth_giving_again(fleet: Fleet) -> None:
    parts: Any = SimpleNamespace(registry=fleet.registry, adapters=fleet.adapters, send=lambda *_: True)
    orders = AdapterOrders(parts)
    loading = asyncio.create_task(orders.load("a", "/a", in_place=False))
    await asyncio.sleep(0)
    for address in fleet.registry.workers:
        fleet.registry.on_cut(address)
    with pytest.raises(Unavailable, match="Adapter 'a' was not loaded: its workers are gone"):
        await asyncio.wait_for(loading, 60)

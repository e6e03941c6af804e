"""Which workers may serve after an order, and which have executed it."""

from __future__ import annotations

import pytest

from common.wire.messages import ServingMode, ServingState, SetServing
from router.fleet.registry import WorkerRegistry
from router.fleet.serving import FleetServing

from ...fake_worker import heartbeat_of, hello_of

ADDRESSES = ("tcp://a", "tcp://b")


@pytest.fixture
def registry() -> WorkerRegistry:
    found = WorkerRegistry((), ADDRESSES, worker_timeout_s=60.0)
    for address in ADDRESSES:
        found.on_hello(address, hello_of(address), 0.0)
    return found


@pytest.fixture
def serving(registry: WorkerRegistry) -> FleetServing:
    found = FleetServing(registry)
    for address in ADDRESSES:
        beat(registry, found, address, None)
    return found


def beat(
    registry: WorkerRegistry, serving: FleetServing, address: str, state: ServingState | None
) -> tuple[SetServing | None, bool]:
    message = heartbeat_of(address, serving=state)
    registry.on_heartbeat(address, message, 0.0)
    return serving.on_heartbeat(registry.workers[address], message)


def state_of(order: SetServing, active: int, *, failed: str = "") -> ServingState:
    return ServingState(
        order.version, order.mode, "failed" if failed else "done", order.weights, order.weights_number,
        order.weight_version, active, order.aborts, failed,
    )  # fmt: skip


def ready(registry: WorkerRegistry) -> list[str]:
    return [worker.address for worker in registry.ready("decode")]


def test_only_workers_with_the_newest_weights_serve(registry: WorkerRegistry, serving: FleetServing) -> None:
    assert ready(registry) == list(ADDRESSES)
    order = SetServing(version=7, weights="/new", weights_number=5, weight_version="v")
    serving.order(order)
    assert ready(registry) == [] and serving.outcome(order).missing == ("worker tcp://a", "worker tcp://b")
    assert beat(registry, serving, "tcp://a", state_of(order, 5)) == (None, False)
    assert ready(registry) == ["tcp://a"] and serving.weight_version == "v"
    assert beat(registry, serving, "tcp://b", None) == (order, False), "a restarted worker gets the order"
    beat(registry, serving, "tcp://b", state_of(order, 0, failed="no room"))
    outcome = serving.outcome(order)
    assert (outcome.missing, outcome.failures, outcome.num_done) == ((), ("worker tcp://b: no room",), 1)
    assert ready(registry) == ["tcp://a"]
    serving.order(SetServing(version=8))
    assert serving.outcome(order).superseded and ready(registry) == ["tcp://b"], "the way back"


@pytest.mark.parametrize("mode", ["pause", "sleep"])
def test_a_router_learns_what_another_has_ordered(
    registry: WorkerRegistry, serving: FleetServing, mode: ServingMode
) -> None:
    order = SetServing(version=9, mode=mode, aborts=True)
    assert beat(registry, serving, "tcp://a", state_of(order, 0)) == (None, True)
    assert serving.newest == order and serving.mode == mode
    assert beat(registry, serving, "tcp://a", state_of(order, 0)) == (None, False), "requests are aborted once"
    assert beat(registry, serving, "tcp://b", None) == (order, False)

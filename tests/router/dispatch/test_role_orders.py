"""A router over sockets: it orders a change, follows the worker into its new role, and uses it there."""

from __future__ import annotations

from typing import Any

import pytest

from common.wire.messages import AnyMessage, ChangeRole, DecodeRequest, PrefillRequest
from router.dispatch import role_changes
from router.dispatch.dispatcher import Dispatcher

SETTINGS: dict[str, Any] = {"role_change": True}


@pytest.fixture(autouse=True)
def _change_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHANGE_AFTER_S", "CHANGE_INTERVAL_S"):
        monkeypatch.setattr(role_changes, name, 0.1)


def obeys(worker: Any) -> None:
    """Have the worker do what it is told, and say that it may be told."""
    take = worker.take

    def take_orders(router: bytes, message: AnyMessage) -> None:
        take(router, message)
        if isinstance(message, ChangeRole):
            worker.role, worker.epoch = message.role, worker.epoch + 10**6
            worker.beat = {"planner": worker.beat["planner"]}
            for name in worker.routers:
                worker.send(name, worker.hello_message())

    worker.take = take_orders
    worker.hello |= {"home": worker.role, "changes_role": True}


async def test_a_worker_is_ordered_to_the_pool_that_is_behind_and_used_there(cluster: Any, tools: Any) -> None:
    workers = [cluster.add("prefill"), cluster.add("decode"), cluster.add("decode")]
    for worker in workers:
        obeys(worker)
    dispatcher: Dispatcher = await cluster.start(0, 0, **SETTINGS)
    assert not any(worker.of(ChangeRole) for worker in workers)
    for worker in workers:
        worker.beat["planner"] = dispatcher.fleet.router_id
    workers[0].beat |= {"waiting_s": 5.0, "num_waiting_tokens": 9000}
    await tools.until(lambda: any(worker.of(ChangeRole) for worker in workers))
    (moved,) = (worker for worker in workers if worker.of(ChangeRole))
    assert moved in workers[1:] and moved.role == "prefill"
    for field in ("waiting_s", "num_waiting_tokens"):
        del workers[0].beat[field]
    known = dispatcher.fleet.registry.workers[moved.address]
    await tools.until(lambda: known.ready and known.role == "prefill")
    assert known.home == "decode" and dispatcher.fleet.registry.role_changes == {("decode", "prefill"): 1}

    workers[0].beat["draining"] = True
    await tools.until(lambda: len(dispatcher.fleet.registry.ready("prefill")) == 1)
    request = tools.request()
    tokens, _ = await tools.collect(dispatcher, request)
    assert tokens == tools.expected(request.prompt_token_ids, 8)
    assert len(moved.of(PrefillRequest)) == 1 and not moved.of(DecodeRequest)
    load = {each.address: (each.home, each.role) for each in dispatcher.load().workers}
    assert load[moved.address] == ("decode", "prefill") and load[workers[0].address] == ("prefill", "prefill")


async def test_a_listed_worker_keeps_its_place_in_another_role(cluster: Any, tools: Any) -> None:
    """Discovery lists workers by their homes: one that works elsewhere is no new worker."""
    worker = cluster.add("decode")
    obeys(worker)
    worker.beat["planner"] = ""
    cluster.add("decode")
    dispatcher: Dispatcher = await cluster.start(0, 0, **SETTINGS)
    worker.take(next(iter(worker.routers)), ChangeRole(role="prefill", reason="another router's"))
    known = dispatcher.fleet.registry.workers[worker.address]
    await tools.until(lambda: known.ready and known.role == "prefill")
    dispatcher.fleet.reconcile(list(dispatcher.fleet._wanted.values()))
    await tools.until(lambda: known.ready)
    assert dispatcher.fleet.registry.workers[worker.address] is known and not known.withheld

"""Workers that come and go while the router serves."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from common.wire.messages import AbortRequest, DecodeRequest
from router.dispatch.dispatcher import Dispatcher
from router.fleet import fleet
from router.fleet.discovery import Endpoint
from router.fleet.fleet import MAX_DISCOVERED


def listed(*workers: Any, **conditions: bool) -> list[Endpoint]:
    return [Endpoint(worker.role, worker.address, **conditions) for worker in workers]


def is_ready(dispatcher: Any, worker: Any) -> bool:
    known = dispatcher.fleet.registry.workers.get(worker.address)
    return known is not None and known.ready


async def started(dispatcher: Any, tools: Any, **options: Any) -> asyncio.Task[Any]:
    """A request that has got its first tokens."""
    request = tools.request(**{"max_tokens": 60, **options})
    task = asyncio.create_task(tools.collect(dispatcher, request))
    await tools.until(lambda: dispatcher.load().stages["decode"] == 1)
    return task


async def test_a_worker_that_joins_gets_work(cluster: Any, tools: Any) -> None:
    dispatcher = await cluster.start(0, 1)
    (old,) = cluster.decode
    new = cluster.add("decode")
    dispatcher.fleet.reconcile(listed(old, new))
    await tools.until(lambda: is_ready(dispatcher, new))
    await asyncio.gather(*(tools.collect(dispatcher, tools.request()) for _ in range(4)))
    assert len(new.of(DecodeRequest)) == len(old.of(DecodeRequest)) == 2


@pytest.mark.slow
async def test_a_worker_that_is_removed_ends_its_streams_and_is_forgotten(cluster: Any, tools: Any) -> None:
    dispatcher = await cluster.start(0, 1)
    (leaving,) = cluster.decode
    leaving.token_s = 0.02
    request = tools.request(max_tokens=2000)  # far more than it says before it may hurry
    task = asyncio.create_task(tools.collect(dispatcher, request))
    await tools.until(lambda: dispatcher.load().stages["decode"] == 1)
    staying = cluster.add("decode")
    dispatcher.fleet.reconcile(listed(staying))
    await tools.until(lambda: is_ready(dispatcher, staying))
    await tools.collect(dispatcher, tools.request())
    assert (len(staying.of(DecodeRequest)), len(leaving.of(DecodeRequest))) == (1, 1)
    states = {worker.address: worker.state for worker in dispatcher.load().workers}
    assert states == {leaving.address: "withheld", staying.address: "ready"}
    assert dispatcher.load().workers[0].reason == "no longer listed"
    leaving.token_s = 0.0
    tokens, last = await task
    assert tokens == tools.expected(request.prompt_token_ids, 2000)
    assert last.timeline.num_attempts == 1
    await tools.until(lambda: leaving.address not in dispatcher.fleet.connections)
    events = [(event.kind, event.worker, event.detail) for event in dispatcher.load().events]
    assert events[0] == ("gone", leaving.worker_id, "")
    assert {("withheld", leaving.worker_id, "no longer listed"), ("found", staying.address, "")} <= set(events)
    assert [worker.address for worker in dispatcher.load().workers] == [staying.address]
    assert not leaving.of(AbortRequest)


async def test_streams_of_a_removed_worker_move_when_it_dies(cluster: Any, tools: Any) -> None:
    dispatcher = await cluster.start(0, 2)
    leaving, staying = cluster.decode
    leaving.token_s = staying.token_s = 0.02
    request = tools.request(max_tokens=60)
    task = asyncio.create_task(tools.collect(dispatcher, request))
    await tools.until(lambda: dispatcher.load().stages["decode"] == 1)
    if not leaving.of(DecodeRequest):
        leaving, staying = staying, leaving
    dispatcher.fleet.reconcile(listed(staying))
    leaving.die()
    leaving.tasks = []
    tokens, last = await task
    assert tokens == tools.expected(request.prompt_token_ids, 60)
    assert last.timeline.num_attempts == 2
    await tools.until(lambda: leaving.address not in dispatcher.fleet.registry.workers)


@pytest.mark.slow
async def test_a_prefill_worker_stays_connected_until_its_kv_is_handed_over(cluster: Any, tools: Any) -> None:
    dispatcher = await cluster.start(1, 1)
    (prefill,), (decode,) = cluster.prefill, cluster.decode
    decode.token_s, asked = 0.02, list[Any]()
    prefill.on_request = lambda router, message: not asked.append((router, message))
    prefill.beat["num_running"] = 1
    request = tools.request(max_tokens=2000)  # far more than it says before it may hurry
    task = asyncio.create_task(tools.collect(dispatcher, request))
    await tools.until(lambda: asked)
    dispatcher.fleet.reconcile(listed(decode))
    await asyncio.sleep(0.1)
    assert prefill.address in dispatcher.fleet.connections
    prefill.start(*asked[0])
    await tools.until(lambda: prefill.address not in dispatcher.fleet.connections)
    assert not task.done()  # its part was over before the stream
    assert dispatcher.ready == (True, "no prefill worker is configured")
    decode.token_s = 0.0
    tokens, _ = await task
    assert tokens == tools.expected(request.prompt_token_ids, 2000)


@pytest.mark.slow
async def test_a_worker_that_comes_back_in_time_is_never_cut(cluster: Any, tools: Any) -> None:
    dispatcher = await cluster.start(0, 1)
    (worker,) = cluster.decode
    worker.token_s = 0.02
    task = await started(dispatcher, tools, max_tokens=2000)
    dispatcher.fleet.reconcile([])
    assert not is_ready(dispatcher, worker)
    waiting = asyncio.create_task(tools.collect(dispatcher, tools.request()))
    await tools.until(lambda: dispatcher.load().stages["queue"] == 1)
    dispatcher.fleet.reconcile(listed(worker))
    worker.token_s = 0.0
    await waiting
    await task
    assert dispatcher.load().workers[0].num_cuts == 0


@pytest.mark.parametrize("conditions", [{"serving": False}, {"terminating": True}], ids=["unready", "terminating"])
async def test_a_worker_that_is_not_to_be_used_is_known_and_gets_nothing(
    cluster: Any, tools: Any, conditions: dict[str, bool]
) -> None:
    dispatcher = await cluster.start(0, 2)
    other, withheld = cluster.decode
    dispatcher.fleet.reconcile(listed(other) + listed(withheld, **conditions))
    await asyncio.gather(*(tools.collect(dispatcher, tools.request()) for _ in range(4)))
    assert not withheld.of(DecodeRequest)
    assert withheld.address in dispatcher.fleet.connections
    dispatcher.fleet.reconcile(listed(withheld))
    await tools.collect(dispatcher, tools.request())
    assert len(withheld.of(DecodeRequest)) == 1


async def test_when_no_worker_passes_its_probe_their_own_heartbeats_decide(
    cluster: Any, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A control plane that lost the heartbeats of its nodes marks all pods unready, though every socket lives."""
    dispatcher = await cluster.start(1, 2)
    prefill, *decode = cluster.workers
    ending = cluster.add("decode")
    unready = listed(*decode, serving=False)
    leaving = listed(ending, serving=False, terminating=True)
    for _ in range(2):
        dispatcher.fleet.reconcile(listed(prefill) + unready + leaving)
    assert [is_ready(dispatcher, worker) for worker in (*decode, ending)] == [True, True, False]
    assert len([line for line in caplog.messages if "all decode workers fail them" in line]) == 1
    await tools.collect(dispatcher, tools.request())
    dispatcher.fleet.reconcile(listed(prefill, decode[0]) + listed(decode[1], serving=False))
    assert [is_ready(dispatcher, worker) for worker in decode] == [True, False]


async def test_a_request_waits_for_the_first_worker_there_ever_is(cluster: Any, tools: Any) -> None:
    dispatcher = await cluster.start(0, 0)
    assert dispatcher.ready == (False, "no decode worker is configured")
    request = tools.request()
    task = asyncio.create_task(tools.collect(dispatcher, request))
    await tools.until(lambda: dispatcher.demand(0.0).held["decode"] == 1)
    dispatcher.fleet.reconcile(listed(cluster.add("decode"), cluster.add("prefill")))
    tokens, _ = await task
    assert tokens == tools.expected(request.prompt_token_ids, 8)
    assert dispatcher.demand(0.0).held == {"decode": 0, "prefill": 0}


async def test_an_address_that_changes_its_role_is_a_new_worker(cluster: Any, tools: Any) -> None:
    dispatcher = await cluster.start(0, 2)
    stays, changes = cluster.decode
    changes.role = "prefill"
    dispatcher.fleet.reconcile(listed(stays, changes))
    await tools.until(lambda: is_ready(dispatcher, changes))
    assert dispatcher.fleet.registry.workers[changes.address].role == "prefill"


async def test_nothing_is_left_of_workers_that_came_and_went(cluster: Any, tools: Any) -> None:
    dispatcher = await cluster.start(0, 1)
    (stays,) = cluster.decode
    num_tasks = len(asyncio.all_tasks())
    guests = [cluster.add("decode") for _ in range(3)]
    own = 2 * len(guests)  # the fakes' own
    for _ in range(5):
        dispatcher.fleet.reconcile(listed(stays, *guests))
        await tools.until(lambda: all(is_ready(dispatcher, guest) for guest in guests))
        dispatcher.fleet.reconcile(listed(stays))
    await tools.until(lambda: len(asyncio.all_tasks()) == num_tasks + own)
    assert list(dispatcher.fleet.connections) == list(dispatcher.fleet.registry.workers) == [stays.address]
    assert not dispatcher.fleet.failure


async def test_discovery_cannot_bring_more_workers_than_the_router_holds(
    cluster: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.fleet.fleet.MAX_DISCOVERED", 2)
    assert MAX_DISCOVERED > 100
    dispatcher = await cluster.start(0, 1)
    (worker,) = cluster.decode
    others = [Endpoint("decode", f"tcp://127.0.0.1:{port}") for port in (1, 2, 3)]
    dispatcher.fleet.reconcile(listed(worker) + others)
    assert len(dispatcher.fleet.connections) == 2
    assert "found 4 workers, using only the first 2" in caplog.text


async def test_only_the_loss_of_a_worker_that_served_is_a_warning(
    cluster: Any, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="router.fleet.worker_monitor")
    loading, served = cluster.add("decode"), cluster.add("decode")
    loading.beat["ready"] = False
    dispatcher = await cluster.start(0, 0, wait=False)
    states = dispatcher.fleet.registry.workers
    await tools.until(lambda: is_ready(dispatcher, served) and states[loading.address].load.beat is not None)

    def level_of(line: str) -> int:
        return next((record.levelno for record in caplog.records if record.getMessage().startswith(line)), 0)

    for worker in (loading, served):
        worker.die()
    await tools.until(lambda: level_of(f"worker {served.worker_id}: lost: ") == logging.WARNING)
    await tools.until(lambda: level_of(f"worker {loading.worker_id}: lost before it was ready: ") == logging.INFO)
    loading.beat["ready"] = True
    await loading.restart()
    await tools.until(lambda: is_ready(dispatcher, loading))
    loading.die()
    await tools.until(lambda: level_of(f"worker {loading.worker_id}: lost: ") == logging.WARNING)


async def test_log_lines_name_a_worker_by_its_id_once_it_is_known(
    cluster: Any, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """From discovery to removal: found, ready, withheld, lost and removed; only the hello states id and address."""
    caplog.set_level(logging.INFO, logger="router")
    dispatcher = await cluster.start(0, 0, wait=False)
    worker, name = (one := cluster.add("decode")), f"worker {one.worker_id}"
    endpoint = Endpoint("decode", worker.address)
    dispatcher.fleet.reconcile([endpoint])
    await tools.until(lambda: is_ready(dispatcher, worker))
    dispatcher.fleet.reconcile([Endpoint("decode", worker.address, terminating=True)])
    worker.die()
    await tools.until(lambda: any(line.startswith(f"{name}: lost: ") for line in caplog.messages))
    assert dispatcher.ready[1].startswith(f"no decode worker is ready (1 configured: {name}: ")
    (shown,) = dispatcher.load().workers
    assert (shown.worker_id, shown.address) == (worker.worker_id, worker.address)
    dispatcher.fleet.reconcile([])
    await tools.until(lambda: f"{name} (decode): removed: no longer listed" in caplog.messages)
    assert {event.worker for event in dispatcher.load().events} == {worker.address, worker.worker_id}
    with_address = [line for line in caplog.messages if worker.address in line]
    assert with_address[0] == f"worker at {worker.address} (decode): discovered"
    assert [line.partition(" (KV layout")[0] for line in with_address[1:]] == [f"{name} at {worker.address}: connected"]
    assert f"{name} (decode): no new requests: terminating" in caplog.messages


async def test_pools_that_do_not_fit_are_said_once(cluster: Any, tools: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    cluster.add("prefill", fingerprint="new", version="2.0")
    cluster.add("prefill", fingerprint="old", version="1.0")
    dispatcher = await cluster.start(0, 1)
    assert dispatcher.ready[0]
    await tools.until(lambda: dispatcher.fleet.pairing.impossible)
    assert dispatcher.fleet.pairing.unpaired.keys() == {worker.address for worker in cluster.workers}
    is_ready, note = dispatcher.ready
    assert is_ready and "no prefill worker can serve a decode worker" in note and "layout new" in note
    await asyncio.sleep(0.1)
    assert caplog.text.count("KV cannot pass between") == 1
    cluster.prefill[0].die()
    cluster.prefill[0].tasks = []
    cluster.add("prefill")
    dispatcher.fleet.reconcile(listed(*cluster.workers[1:]))
    await tools.until(lambda: len(dispatcher.fleet.pairing.unpaired) == 1 and not dispatcher.fleet.pairing.impossible)
    assert dispatcher.ready == (True, "")


async def discovering(cluster: Any, folder: Path, *decode: str) -> Any:
    """A dispatcher that has just started and finds these workers in a file."""
    file = folder / "workers.json"
    file.write_text(json.dumps({"prefill": [], "decode": decode}))
    config = cluster.config(prefill=(), decode=(), discovery="file", discovery_file=str(file))
    cluster.dispatcher = Dispatcher(config)
    await cluster.dispatcher.start()
    return cluster.dispatcher


async def test_a_new_router_waits_until_it_knows_most_of_the_discovered_workers(
    cluster: Any, tools: Any, tmp_path: Path
) -> None:
    known, deaf = cluster.add("decode"), [cluster.add("decode") for _ in range(4)]
    for worker in deaf:
        worker.die()
        worker.tasks = []
    dispatcher = await discovering(cluster, tmp_path, *(worker.address for worker in cluster.workers))
    await tools.until(lambda: dispatcher.fleet.registry.ready("decode"))
    assert dispatcher.ready == (
        False, "1 of 5 decode workers have answered, waiting for 80% of them for up to 15 s after the start",
    )  # fmt: skip
    for worker in deaf[:3]:
        await worker.restart()
    await tools.until(lambda: dispatcher.ready[0])
    dispatcher.fleet.reconcile(listed(known, *deaf, *(cluster.add("decode") for _ in range(9))))
    assert dispatcher.ready[0]


async def test_a_new_router_does_not_wait_for_ever(
    cluster: Any, tools: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fleet, "INTRODUCTION_S", 0.1)
    dispatcher = await discovering(cluster, tmp_path, cluster.add("decode").address, "tcp://127.0.0.1:1")
    await tools.until(lambda: dispatcher.ready[0])


@pytest.mark.slow_except("0")
@pytest.mark.parametrize("seed", range(3))
async def test_whatever_discovery_says_each_request_is_answered_once(cluster: Any, tools: Any, seed: int) -> None:
    """Random sets of listed, withheld and dying workers; in the end everybody is listed."""
    source = random.Random(seed)
    dispatcher = await cluster.start(2, 3, max_retries=100, queue_timeout_s=30.0)
    for worker in cluster.workers:
        worker.token_s = 0.01
    requests = [tools.request([source.randrange(1, 500) for _ in range(20)], max_tokens=25) for _ in range(24)]
    tasks = [asyncio.create_task(tools.collect(dispatcher, request)) for request in requests]
    for _ in range(25):
        there = [worker for worker in cluster.workers if source.random() < 0.6]
        states = [{}, {}, {"serving": False}, {"terminating": True}]
        dispatcher.fleet.reconcile([one for worker in there for one in listed(worker, **source.choice(states))])
        if source.random() < 0.2:
            victim = source.choice(cluster.workers)
            victim.die()
            await victim.restart()
        await asyncio.sleep(0.03)
    dispatcher.fleet.reconcile(listed(*cluster.workers))
    answers = await asyncio.gather(*tasks)
    for request, (tokens, _) in zip(requests, answers, strict=True):
        assert tokens == tools.expected(request.prompt_token_ids, 25)
    await tools.until(lambda: all(is_ready(dispatcher, worker) for worker in cluster.workers))
    booked = [worker.bookings.total for worker in dispatcher.fleet.registry.workers.values()]
    assert [(load.num_requests, load.num_tokens, load.num_blocks) for load in booked] == [(0, 0, 0)] * 5
    assert not dispatcher.fleet.failure

"""A worker that lies to the router about itself, and about requests that run elsewhere."""

import asyncio

import pytest

from common.wire.messages import PrefillRequest, TokenOutput, ToRouter

from ...hostile import forged, garbage

PROMPT = list(range(1, 40))


async def streaming(dispatcher, tools, **options):
    task = asyncio.create_task(tools.collect(dispatcher, tools.request(PROMPT, **options)))
    await tools.until(lambda: dispatcher.load().stages["decode"])
    return task


@pytest.fixture
async def lied_to(cluster, tools):
    """(dispatcher, an honest decode worker that serves slowly, a liar, the name of the router)"""
    dispatcher = await cluster.start(prefill=2)
    honest, liar = cluster.decode[0], cluster.prefill[1]
    honest.token_s = 0.01
    (router,) = liar.routers
    return dispatcher, honest, liar, router


@pytest.mark.parametrize("disguised", [False, True])
async def test_lies_about_other_workers_requests_change_nothing(lied_to, tools, disguised):
    dispatcher, honest, liar, router = lied_to
    task = await streaming(dispatcher, tools, max_tokens=60)
    (request_id,) = dispatcher.core.states
    own = {"worker_id": liar.worker_id, "epoch": liar.epoch}
    messages = forged(request_id, **({"worker_id": honest.worker_id, "epoch": honest.epoch} if disguised else own))
    for message in messages:
        liar.send(router, message)
    drops = dispatcher.fleet.connections[liar.address].drops
    await tools.until(lambda: drops.num_dropped == len([m for m in messages if not isinstance(m, ToRouter)]))
    assert (await task)[0] == tools.expected(PROMPT, 60)
    num_lies = sum(len(message.outputs) for message in messages if isinstance(message, TokenOutput))
    assert dispatcher.load().num_stale_deltas >= num_lies
    assert (await tools.collect(dispatcher, tools.request(PROMPT)))[0] == tools.expected(PROMPT, 8)


async def test_garbage_from_a_worker_is_counted(lied_to, tools):
    dispatcher, _, liar, router = lied_to
    task = await streaming(dispatcher, tools, max_tokens=60)
    parts = [parts for parts in garbage("a") if sum(map(len, parts)) < 2**20]
    for frames in parts:
        liar.socket.send_multipart([router, *frames])
    drops = dispatcher.fleet.connections[liar.address].drops
    await tools.until(lambda: drops.num_dropped > len(parts) / 2)
    assert (await task)[0] == tools.expected(PROMPT, 60)
    assert dispatcher.fleet.failure == ""


async def test_a_frame_larger_than_any_message_costs_the_connection_only(lied_to, tools):
    dispatcher, _, liar, router = lied_to
    liar.socket.send_multipart([router, b"x" * (2**24 + 1)])
    counters = dispatcher.fleet.connections[liar.address].counters
    await tools.until(lambda: counters.num_cuts == 1)
    assert (await tools.collect(dispatcher, tools.request(PROMPT)))[0] == tools.expected(PROMPT, 8)


@pytest.mark.parametrize("numbers", [{"num_free_blocks": 2**62}, {"num_running": 2**62}, {"tokens_per_s": -1e15}])
async def test_impossible_numbers_in_heartbeats_do_not_stop_the_router(lied_to, tools, numbers):
    dispatcher, _, liar, _ = lied_to
    liar.beat |= numbers
    (name,) = numbers
    worker = dispatcher.fleet.registry.workers[liar.address]
    await tools.until(lambda: worker.load.beat and getattr(worker.load.beat, name) == numbers[name])
    for _ in range(4):
        assert (await tools.collect(dispatcher, tools.request(PROMPT)))[0] == tools.expected(PROMPT, 8)
    assert dispatcher.fleet.failure == ""


async def test_a_worker_that_says_it_is_another_gets_nothing(lied_to, tools):
    dispatcher, _, liar, router = lied_to
    liar.beating = False
    hello = next(message for message in forged("a") if type(message).__name__ == "WorkerHello")
    liar.hello_message = lambda: hello  # however often it is asked
    liar.send(router, hello)
    await tools.until(
        lambda: "configured as a prefill worker" in dispatcher.fleet.registry.workers[liar.address].reason
    )
    num_before = len(liar.of(PrefillRequest))
    for _ in range(3):
        assert (await tools.collect(dispatcher, tools.request(PROMPT)))[0] == tools.expected(PROMPT, 8)
    assert len(liar.of(PrefillRequest)) == num_before

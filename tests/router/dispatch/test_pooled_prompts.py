"""Prompts that become one vector: on prefill workers alone, and whole whatever happens to workers."""

from __future__ import annotations

import asyncio
import struct

import pytest
from msgspec.structs import replace

from common.errors import Unavailable
from common.wire.messages import AbortRequest, DecodeRequest, PooledOutput, PrefillRequest
from router.dispatch.dispatcher import Dispatcher

from ...fake_worker import vector_of

PROMPT = list(range(1, 41))


async def events(dispatcher, tools, tokens=PROMPT, pooling="last"):
    request = replace(tools.request(tokens, max_tokens=1, pooling=pooling), pooled_width=4)
    return [event async for event in dispatcher.generate(request)]


async def test_a_prefill_worker_alone_makes_it(cluster, tools):
    dispatcher = await cluster.start(prefill=2, decode=2)
    for _ in range(3):
        (event,) = await events(dispatcher, tools)
        assert (event.pooled, event.token_ids, event.finish_reason) == (vector_of(PROMPT), (), "stop")
        assert event.timeline.prefill_worker and not event.timeline.decode_worker
    asked = [m for worker in cluster.workers for m in worker.of((PrefillRequest, DecodeRequest))]
    assert len(asked) == 3 and all(isinstance(m, PrefillRequest) and m.decode is None for m in asked)
    assert not any(worker.bookings for worker in dispatcher.fleet.registry.workers.values())


async def test_without_prefill_workers_it_is_unavailable(cluster, tools):
    dispatcher = await cluster.start(prefill=0, decode=1, queue_timeout_s=0.2)
    with pytest.raises(Unavailable, match="prefill"):
        await events(dispatcher, tools)
    assert not cluster.decode[0].of(DecodeRequest)


@pytest.mark.parametrize("told", [False, True])
async def test_a_worker_that_dies_costs_nothing(cluster, tools, told):
    dispatcher = await cluster.start(prefill=2, decode=0)

    def begin(router, message, worker):
        """The vector, maybe, and no end."""
        if told:
            worker.send_pooled(router, message, PROMPT)
        return True

    for worker in cluster.prefill:
        worker.on_request = lambda router, message, worker=worker: begin(router, message, worker)
    task = asyncio.create_task(events(dispatcher, tools))
    await tools.until(lambda: any(worker.of(PrefillRequest) for worker in cluster.prefill))
    victim = next(worker for worker in cluster.prefill if worker.of(PrefillRequest))
    for worker in cluster.prefill:
        worker.on_request = lambda router, message: False
    victim.die()
    (event,) = await task
    assert event.pooled == vector_of(PROMPT) and event.timeline.num_attempts == 2


WRONG = {
    "lost": None,
    "too short": vector_of(PROMPT)[:-4],
    "too long": vector_of(PROMPT) + b"\0" * 4,
    "cut": vector_of(PROMPT)[:-1],
    "infinite": struct.pack("<4f", 1.0, float("inf"), 0.0, 0.0),
    "no number": struct.pack("<4f", 1.0, float("nan"), 0.0, 0.0),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_worker_whose_vector_is_wrong_is_not_believed(cluster, tools, wrong):
    dispatcher = await cluster.start(prefill=2, decode=0)
    liar, values = cluster.prefill[0], WRONG[wrong]

    def lie(router, message, tokens):
        if values is not None:
            liar.send(
                router,
                PooledOutput(
                    worker_id=liar.worker_id, epoch=liar.epoch, request_id=message.request_id,
                    attempt=message.attempt, values=values,
                ),
            )  # fmt: skip

    liar.send_pooled = lie
    for number in range(4):  # the liar has its turn
        tokens = [number, *PROMPT]
        (event,) = await events(dispatcher, tools, tokens)
        assert event.pooled == vector_of(tokens)
    assert liar.of(PrefillRequest)
    assert dispatcher.load().num_retries["prefill"] >= 1


async def test_a_token_in_place_of_a_vector_is_not_believed(cluster, tools):
    dispatcher = await cluster.start(prefill=2, decode=0)
    liar = cluster.prefill[0]
    liar.on_request = lambda router, message: liar.output(router, message, 0, [7], "length") or True
    for number in range(4):
        tokens = [number, *PROMPT]
        (event,) = await events(dispatcher, tools, tokens)
        assert event.pooled == vector_of(tokens) and not event.token_ids
    assert liar.of(PrefillRequest)


async def test_a_vector_of_an_earlier_attempt_or_life_is_dropped(cluster, tools):
    dispatcher = await cluster.start(prefill=1, decode=0)
    (worker,), held = cluster.prefill, []
    worker.on_request = lambda router, message: held.append((router, message)) or True
    task = asyncio.create_task(events(dispatcher, tools))
    await tools.until(lambda: held)
    (router, message), forged = held[0], [9] * 40
    worker.send_pooled(router, replace(message, attempt=message.attempt + 1), forged)
    worker.epoch += 1
    worker.send_pooled(router, message, forged)
    worker.epoch -= 1
    await tools.until(lambda: dispatcher.load().num_stale_deltas == 2)
    worker.send_pooled(router, message, PROMPT)
    worker.output(router, message, 0, [], "stop")
    (event,) = await task
    assert event.pooled == vector_of(PROMPT)


async def test_a_client_that_leaves_aborts_it(cluster, tools):
    dispatcher = await cluster.start(prefill=1, decode=0)
    (worker,) = cluster.prefill
    worker.on_request = lambda router, message: True
    task = asyncio.create_task(events(dispatcher, tools))
    await tools.until(lambda: worker.of(PrefillRequest))
    task.cancel()
    await tools.until(lambda: worker.of(AbortRequest))
    assert not dispatcher.core.states


@pytest.mark.parametrize(("pooling", "expects_hits"), [("last", True), ("mean", False)])
async def test_only_the_last_token_is_sent_to_what_is_cached(cluster, tools, pooling, expects_hits):
    """A mean needs the hidden states of all tokens, so a cached prefix is worth nothing to it."""
    dispatcher = await cluster.start(prefill=2, decode=0)
    await events(dispatcher, tools)
    state = dispatcher.core._admit(tools.request(PROMPT, max_tokens=1, pooling=pooling), dispatcher._clock())[0]
    hits = dispatcher.core._placement.candidates.hits(state)
    assert (
        bool(hits and max(each.num_blocks(w.address) for each in hits.values() for w in cluster.prefill))
        is expects_hits
    )
    dispatcher.core.end(state)


async def test_a_model_that_does_not_generate_needs_prefill_workers_alone(cluster, tools):
    cluster.add("prefill")
    dispatcher = cluster.dispatcher = Dispatcher(cluster.config(), needed="prefill")
    await dispatcher.start()
    assert not dispatcher.ready[0] and "prefill" in dispatcher.ready[1]
    await tools.until(lambda: dispatcher.ready[0])
    assert dispatcher.ready == (True, "")

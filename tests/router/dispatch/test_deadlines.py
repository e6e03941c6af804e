"""Every phase of a request ends: what it waits for comes, or its deadline moves it or fails it."""

import asyncio
import dataclasses
import logging
import re
import time
from collections import Counter

import pytest

from common.errors import FatalRequest, Overloaded, Unavailable
from common.latency.step_model import StepModel
from common.wire.messages import AbortRequest, DecodeRequest, PrefillRequest
from router.dispatch.request_state import RequestState
from router.policy import wait_limit

PROMPT = list(range(1, 13))


def keep_busy(worker):
    """It looks as if it were at work."""
    worker.beat["num_running"] = 1


def busy_for(seconds):
    """What a worker reports that has prompts for so long."""
    return {"waiting_s": seconds, "step_model": StepModel(token_s=1e-3, num_steps=100)}


@pytest.mark.slow
async def test_a_prompt_that_a_busy_worker_lost_moves_after_its_deadline(cluster, tools):
    dispatcher = await cluster.start(prefill=2, prefill_timeout_s=0.8)
    for worker in cluster.prefill:
        worker.on_request = lambda router, message: message.attempt == 0
        keep_busy(worker)
    tokens, last = await tools.collect(dispatcher, tools.request(PROMPT))
    assert tokens == tools.expected(PROMPT, 8)
    assert last.timeline.num_attempts == 2
    assert [len(worker.of(PrefillRequest)) for worker in cluster.prefill] == [1, 1]


async def test_a_request_whose_prefill_never_comes_fails_and_names_the_phase(cluster, tools):
    dispatcher = await cluster.start(prefill=0, decode=2, prefill_timeout_s=0.4, max_retries=1)
    for worker in cluster.decode:
        worker.serving = False
        keep_busy(worker)
    with pytest.raises(Unavailable, match=r"Gave up after 2 attempts; .* no token for .* in the prefill phase"):
        await tools.collect(dispatcher, tools.request(PROMPT))
    for worker in cluster.decode:
        await tools.until(lambda worker=worker: worker.of(AbortRequest))


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 5])
async def test_a_stream_that_a_busy_worker_forgot_moves_after_its_deadline(cluster, tools, index):
    """With index 0 the tokens stop in the transfer, with the other one while they are generated."""
    dispatcher = await cluster.start(decode=2, token_timeout_s=0.8)
    first = []

    def forget(worker, router, message):
        if message.attempt:
            return False
        first.append(worker)
        if index:
            worker.output(router, message, 0, tools.expected(PROMPT, index))
        return True

    for worker in cluster.decode:
        worker.on_request = lambda router, message, worker=worker: forget(worker, router, message)
        keep_busy(worker)
    tokens, last = await tools.collect(dispatcher, tools.request(PROMPT))
    assert tokens == tools.expected(PROMPT, 8)
    assert last.timeline.decode_worker != first[0].worker_id
    await tools.until(lambda: first[0].of(AbortRequest))


@pytest.mark.parametrize("limit", [pytest.param("prefill_timeout_s", marks=pytest.mark.slow), "token_timeout_s"])
async def test_a_deadline_below_that_of_silence_is_kept(cluster, tools, limit):
    dispatcher = await cluster.start(prefill=0, decode=2, worker_timeout_s=60.0, **{limit: 0.3})

    def hang(worker, router, message):
        if message.attempt == 0 and limit == "token_timeout_s":
            worker.output(router, message, 0, tools.expected(PROMPT, 3))
        return message.attempt == 0

    for worker in cluster.decode:
        worker.on_request = lambda router, message, worker=worker: hang(worker, router, message)
        keep_busy(worker)
    tokens, last = await tools.collect(dispatcher, tools.request(PROMPT))
    assert tokens == tools.expected(PROMPT, 8)
    assert last.timeline.num_attempts >= 2


@pytest.mark.slow
async def test_a_slow_stream_is_left_alone(cluster, tools):
    dispatcher = await cluster.start(prefill=0, token_timeout_s=1.0, prefill_timeout_s=1.0)
    cluster.decode[0].token_s = 0.25
    _, last = await tools.collect(dispatcher, tools.request(PROMPT, max_tokens=6))  # longer than that as a whole
    assert last.timeline.num_attempts == 1


@pytest.mark.slow
async def test_a_started_stream_waits_for_a_decode_worker_as_long_as_a_new_request(cluster, tools):
    dispatcher = await cluster.start(queue_timeout_s=0.5)
    cluster.decode[0].token_s = 0.02
    stream = dispatcher.generate(tools.request(PROMPT, max_tokens=1000))
    await anext(stream)
    await tools.until(lambda: dispatcher.load().stages["decode"])
    cluster.decode[0].die()
    began = time.monotonic()
    with pytest.raises(Unavailable, match=r"waited .* for a worker"):
        async for _ in stream:
            pass
    assert time.monotonic() - began >= 0.5


@pytest.mark.slow
async def test_a_started_stream_goes_on_when_a_decode_worker_comes_back_in_time(cluster, tools):
    dispatcher = await cluster.start(queue_timeout_s=20.0)
    cluster.decode[0].token_s = 0.01
    stream = dispatcher.generate(tools.request(PROMPT, max_tokens=40))
    tokens = list((await anext(stream)).token_ids)
    await tools.until(lambda: dispatcher.load().stages["decode"])
    cluster.decode[0].die()
    await tools.until(lambda: dispatcher.load().stages["queue"])
    await cluster.decode[0].restart()
    tokens += [token async for event in stream for token in event.token_ids]
    assert tokens == tools.expected(PROMPT, 40)


@pytest.mark.slow
async def test_a_long_stream_outlives_more_workers_than_it_may_retry(cluster, tools):
    dispatcher = await cluster.start(prefill=0, max_retries=1, worker_timeout_s=5.0)
    worker = cluster.decode[0]
    worker.token_s = 0.005
    task = asyncio.create_task(tools.collect(dispatcher, tools.request(PROMPT, max_tokens=60)))
    await tools.until(lambda: dispatcher.core.states)
    (state,) = dispatcher.core.states.values()
    for deaths in range(1, 5):
        await tools.until(lambda goal=10 * deaths: len(state.stream.token_ids) >= goal)
        worker.die()
        await worker.restart()
    tokens, last = await task
    assert tokens == tools.expected(PROMPT, 60)
    assert last.timeline.num_attempts == 5


def poisoned(cluster):
    """Decode workers die of a prompt that begins with 666, and start again."""

    def die(worker, message):
        if message.prompt[:4] != (666).to_bytes(4, "little"):
            return False
        worker.deaths.append(message.request_id)

        async def die_and_restart():
            worker.die()
            await worker.restart()

        worker.rebirths.append(asyncio.create_task(die_and_restart()))
        return True

    for worker in cluster.decode:
        worker.deaths, worker.rebirths = [], []
        worker.on_request = lambda router, message, worker=worker: die(worker, message)


async def test_a_request_that_kills_its_workers_ends_and_the_others_do_not(cluster, tools, caplog):
    dispatcher = await cluster.start(prefill=0, decode=3, max_retries=3, worker_timeout_s=5.0)
    poisoned(cluster)
    for worker in cluster.decode:
        worker.token_s = 0.01
    prompts = [[i, *range(2, 12)] for i in range(1, 25)]
    work = [asyncio.create_task(tools.collect(dispatcher, tools.request(p, max_tokens=60))) for p in prompts]
    with pytest.raises(FatalRequest, match="The last 4 workers that ran this request died"):
        await tools.collect(dispatcher, tools.request([666, *PROMPT]))
    assert [tokens for tokens, _ in await asyncio.gather(*work)] == [tools.expected(p, 60) for p in prompts]
    dead = {worker.worker_id: worker.deaths for worker in cluster.decode if worker.deaths}
    assert sum(map(len, dead.values())) == 4
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    (request_id,) = set(sum(dead.values(), []))
    ended, action = f"request {request_id}: ended with status 400: its last 4 workers died: ", ". If it is sent again, "
    assert line.startswith(ended) and line.endswith(action + "limit its key")
    named = line.removeprefix(ended).partition(action)[0].split(", ")
    assert Counter(named) == {name: len(deaths) for name, deaths in dead.items()}
    await tools.until(lambda: len(dispatcher.fleet.registry.ready("decode")) == 3)
    assert not any(worker.num_booked_requests for worker in dispatcher.load().workers)


@pytest.mark.slow
async def test_suspects_go_one_at_a_time_and_the_innocent_are_cleared(cluster, tools):
    """Those that were near twice wait for each other: the third death has one victim, and nobody fails for another."""
    dispatcher = await cluster.start(prefill=0, decode=1, max_retries=3, worker_timeout_s=5.0)
    (worker,) = cluster.decode
    poisoned(cluster)
    worker.token_s = 30.0  # all die before they have got anywhere
    prompts = [[i, *range(2, 12)] for i in range(1, 9)]
    work = [asyncio.create_task(tools.collect(dispatcher, tools.request(p))) for p in prompts]
    for deaths in (1, 2):
        await tools.until(lambda deaths=deaths: len(worker.of(DecodeRequest)) >= len(prompts) * deaths)
        worker.die()
        await worker.restart()
    worker.received.clear()
    await tools.until(lambda: worker.of(DecodeRequest))
    await asyncio.sleep(0.3)  # for more of them, which must not come
    assert len(worker.of(DecodeRequest)) == 1
    worker.token_s = 0.0
    worker.die()
    await worker.restart()
    assert [tokens for tokens, _ in await asyncio.gather(*work)] == [tools.expected(p, 8) for p in prompts]


async def test_requests_without_a_worker_are_logged_with_the_state_of_each_worker(cluster, tools, caplog):
    dispatcher = await cluster.start(prefill=0, decode=1, queue_timeout_s=0.6)
    cluster.decode[0].die()
    await tools.until(lambda: not dispatcher.fleet.registry.ready("decode"))
    with pytest.raises(Unavailable):
        await asyncio.gather(*(tools.collect(dispatcher, tools.request([i, *PROMPT])) for i in range(2)))
    (line,) = [record.getMessage() for record in caplog.records if "wait for a worker" in record.getMessage()]
    assert re.match(
        r"2 requests wait for a worker, the longest for \d+\.\d s, and get status 503 after 0.6 s: "
        rf"no decode worker is ready \(1 configured: .*{cluster.decode[0].worker_id}",
        line,
    )


async def test_a_worker_that_was_only_silent_makes_nobody_a_suspect(cluster, tools):
    """A machine without time to spare silences its workers. One that comes back has not died of its requests."""
    dispatcher = await cluster.start(prefill=0, decode=2, max_retries=9)
    for worker in cluster.decode:
        worker.token_s = 30.0
    work = asyncio.create_task(tools.collect(dispatcher, tools.request(PROMPT)))
    await tools.until(lambda: any(worker.of(DecodeRequest) for worker in cluster.decode))
    (state,) = dispatcher.core.states.values()
    now, decode = time.monotonic(), state.attempts.decode
    state.record_failure(decode, "silent", now, died=True)
    state.record_failure(decode, "silent again", now, died=True)
    assert state.attempts.num_deaths == 1  # one life ends once
    state.record_failure(dataclasses.replace(decode, epoch=decode.epoch + 1), "restarted, and silent", now, died=True)
    assert state.attempts.num_deaths == 2 and state.attempts.num_fruitless == 3
    dispatcher.on_ready(decode.address)
    assert state.attempts.num_deaths == 1  # its earlier life goes on; the other one does not
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def test_a_request_that_would_wait_too_long_is_refused_at_once(cluster, tools):
    dispatcher = await cluster.start(queue_timeout_s=2.0)
    cluster.prefill[0].beat |= {"num_waiting": 30, "num_waiting_tokens": 10_000} | busy_for(10.0)
    registered = dispatcher.fleet.registry.workers[cluster.prefill[0].address]
    await tools.until(lambda: registered.load.num_queued_tokens)
    with pytest.raises(Overloaded, match=r"would wait about (10\.0|\d\.\d) s") as caught:
        await tools.collect(dispatcher, tools.request(PROMPT))
    assert caught.value.retry_after_s == pytest.approx(8.0, abs=5.0)
    assert dispatcher.load().num_failures == {"Overloaded": 1}
    assert not cluster.prefill[0].of(PrefillRequest)
    with pytest.raises(Overloaded, match=r"would wait about (10\.0|\d\.\d) s"):
        dispatcher.check_room(lambda num_tokens: True)
    assert dispatcher.load().num_failures == {"Overloaded": 2}
    dispatcher.check_room(lambda num_tokens: False)  # it may be short
    short = [1, 2, 3]  # the decode worker computes it itself
    assert (await tools.collect(dispatcher, tools.request(short)))[0] == tools.expected(short, 8)
    cluster.prefill[0].beat.clear()
    await tools.until(lambda: not registered.load.num_queued_tokens)
    assert (await tools.collect(dispatcher, tools.request(PROMPT)))[0] == tools.expected(PROMPT, 8)


async def test_an_slo_refuses_what_would_miss_it(cluster, tools):
    dispatcher = await cluster.start(slo_ttft_ms=500.0, slo_refuse="predicted")
    cluster.prefill[0].beat |= {"num_waiting": 3, "num_waiting_tokens": 1000} | busy_for(1.0)
    registered = dispatcher.fleet.registry.workers[cluster.prefill[0].address]
    await tools.until(lambda: registered.load.num_queued_tokens)
    why = "TTFT goal 500 ms, predicted .* ms: 3 prompts wait before it with 1,000 tokens"
    with pytest.raises(Overloaded, match=why):
        await tools.collect(dispatcher, tools.request(PROMPT))


async def test_a_worker_that_missed_an_abort_is_told_again(cluster, tools):
    """It goes on sending tokens of a request that is over: that is how the router learns of it."""
    dispatcher = await cluster.start(prefill=0)
    (worker,) = cluster.decode
    worker.token_s = 0.05
    connection = dispatcher.fleet.connections[worker.address]
    stream = dispatcher.generate(tools.request(PROMPT, max_tokens=1000))
    await anext(stream)
    send = type(connection).send
    type(connection).send = lambda self, message: isinstance(message, AbortRequest) or send(self, message)
    try:
        await stream.aclose()
    finally:
        type(connection).send = send
    await tools.until(lambda: worker.of(AbortRequest))
    await tools.until(lambda: not worker.jobs)


async def test_a_queue_that_does_not_move_refuses_what_comes_next(cluster, tools):
    dispatcher = await cluster.start(queue_timeout_s=0.3)
    cluster.prefill[0].serving = False
    keep_busy(cluster.prefill[0])
    waiting = [asyncio.create_task(tools.collect(dispatcher, tools.request([n, *PROMPT]))) for n in range(4)]
    registered = dispatcher.fleet.registry.workers[cluster.prefill[0].address]
    await tools.until(lambda: registered.estimates.observed_s > 0.3)
    with pytest.raises(Overloaded, match="would wait about"):
        await tools.collect(dispatcher, tools.request(PROMPT))
    for task in waiting:
        task.cancel()
    await tools.until(lambda: not registered.estimates.observed_s)
    cluster.prefill[0].serving = True
    assert (await tools.collect(dispatcher, tools.request(PROMPT)))[0] == tools.expected(PROMPT, 8)


@pytest.mark.slow
async def test_when_more_comes_than_can_be_served_who_waits_too_long_hears_so(cluster, tools, monkeypatch):
    monkeypatch.setattr(wait_limit, "WINDOW_S", 0.1)
    dispatcher = await cluster.start(max_wait_s=0.4, overload_wait_s=0.2)
    (worker,) = cluster.prefill
    worker.serving = False
    worker.beat |= {"step_model": StepModel(token_s=0.011, num_steps=100)}
    keep_busy(worker)
    registered = dispatcher.fleet.registry.workers[worker.address]
    await tools.until(lambda: registered.load.beat.step_model.is_known)
    asks = [tools.request([n, *PROMPT[1:]]) for n in range(4)]  # 0.13 s each
    waiting = [asyncio.create_task(tools.collect(dispatcher, ask)) for ask in asks]
    await tools.until(lambda: len(worker.of(PrefillRequest)) == 4)
    while dispatcher.load().wait_limit_s > 0.3:
        with pytest.raises(Overloaded, match=r"would wait about 0\.[45] s"):
            await tools.collect(dispatcher, tools.request(PROMPT))
        await asyncio.sleep(0.001)
    for late in waiting[2:]:
        with pytest.raises(Overloaded, match="The service is overloaded"):
            await late
    await tools.until(lambda: len(worker.of(AbortRequest)) == 2)
    assert {message.request_id for message in worker.of(AbortRequest)} == {ask.request_id for ask in asks[2:]}
    assert not waiting[0].done() and not waiting[1].done()
    await tools.until(lambda: dispatcher.load().wait_limit_s == 0.4)
    for task in waiting[:2]:
        task.cancel()


@pytest.mark.parametrize("ttft_s", [0.0, 20.0])
async def test_workers_hear_when_the_first_token_is_due(cluster, tools, ttft_s):
    dispatcher = await cluster.start()
    await tools.collect(dispatcher, tools.request(PROMPT, ttft_s=ttft_s))
    told = [*cluster.prefill[0].of(PrefillRequest), *cluster.decode[0].of(DecodeRequest)]
    assert len(told) == 2 and all(message.ttft_s == pytest.approx(ttft_s, abs=5.0) for message in told)
    assert all((message.ttft_s > 0) == (ttft_s > 0) and message.ttft_s <= ttft_s for message in told)


def test_a_late_first_token_is_still_due(tools):
    """0 would tell the worker that there is no goal."""
    state = RequestState(tools.request(PROMPT, ttft_s=2.0), 10.0)
    assert [state.times.first_token_s(now) for now in (10.0, 11.5, 12.0, 99.0)] == [2.0, 0.5, 0.001, 0.001]
    assert RequestState(tools.request(PROMPT), 10.0).times.first_token_s(99.0) == 0.0

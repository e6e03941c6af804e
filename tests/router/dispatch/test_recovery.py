"""Workers that die, restart, freeze, refuse or lie, while requests are in flight."""

import asyncio

import pytest
from msgspec.structs import replace

from common.errors import InvalidRequest, Unavailable
from common.wire.codec import encode
from common.wire.messages import AbortRequest, DecodeRequest, PrefillRequest, TokenDelta, TokenOutput
from router.fleet import worker as fleet_worker

PROMPT = list(range(1, 13))


def busy(workers):
    """The worker that runs a request now."""
    return next(worker for worker in workers if worker.jobs)


async def test_prefill_dies_before_the_first_token(cluster, tools):
    dispatcher = await cluster.start(prefill=2)
    for worker in cluster.prefill:
        worker.token_s = 30.0
    task = asyncio.create_task(tools.collect(dispatcher, tools.request(PROMPT)))
    await tools.until(lambda: any(worker.of(PrefillRequest) for worker in cluster.prefill))
    victim = busy(cluster.prefill)
    for worker in cluster.prefill:
        worker.token_s = 0.0
    victim.die()
    tokens, last = await task
    assert tokens == tools.expected(PROMPT, 8)
    assert last.timeline.num_attempts == 2
    first, second = cluster.decode[0].of(DecodeRequest)
    assert (first.attempt, second.attempt) == (0, 1)
    assert second.prefill_worker == last.timeline.prefill_worker != victim.worker_id


async def test_prefill_dies_after_the_first_token_and_before_the_transfer(cluster, tools):
    dispatcher = await cluster.start(prefill=2)
    cluster.ship, ship = (lambda *kv: None), cluster.ship
    task = await tools.streaming(dispatcher, PROMPT)
    victim = next(worker for worker in cluster.prefill if worker.of(PrefillRequest))
    cluster.ship = ship
    victim.die()
    tokens, _ = await task
    assert tokens == tools.expected(PROMPT, 8)
    assert [message.num_output_tokens for message in cluster.decode[0].of(DecodeRequest)] == [0, 0]


async def test_the_only_prefill_worker_dies_and_decode_goes_alone(cluster, tools):
    dispatcher = await cluster.start()
    cluster.prefill[0].token_s = 30.0
    task = asyncio.create_task(tools.collect(dispatcher, tools.request(PROMPT)))
    await tools.until(lambda: cluster.prefill[0].of(PrefillRequest))
    cluster.prefill[0].die()
    assert (await task)[0] == tools.expected(PROMPT, 8)
    assert [message.prefill_worker for message in cluster.decode[0].of(DecodeRequest)][-1] == ""


async def test_disaggregation_comes_back_with_the_prefill_worker(cluster, tools):
    dispatcher = await cluster.start()
    cluster.prefill[0].die()
    await tools.until(lambda: not dispatcher.fleet.registry.ready("prefill"))
    await tools.collect(dispatcher, tools.request(PROMPT))
    await cluster.prefill[0].restart()
    await tools.until(lambda: dispatcher.fleet.registry.ready("prefill"))
    await tools.collect(dispatcher, tools.request([7, *PROMPT]))
    assert dispatcher.load().num_choices == {"local": 1, "remote": 1}


@pytest.mark.slow
async def test_decode_dies_mid_stream(cluster, tools):
    dispatcher = await cluster.start(decode=2)
    for worker in cluster.decode:
        worker.token_s = 0.01
    task = await tools.streaming(dispatcher, PROMPT, max_tokens=40)
    await tools.until(lambda: dispatcher.load().stages["decode"])
    victim = busy(cluster.decode)
    victim.die()
    tokens, last = await task
    assert tokens == tools.expected(PROMPT, 40)
    assert last.timeline.decode_worker != victim.worker_id
    (again,) = next(worker for worker in cluster.decode if worker is not victim).of(DecodeRequest)
    assert (again.attempt, again.params.max_tokens) == (1, 40)
    assert 0 < again.num_output_tokens < 40
    assert len(again.prompt) == 4 * (len(PROMPT) + again.num_output_tokens)


@pytest.mark.slow
async def test_decode_restarts_on_the_same_address(cluster, tools):
    dispatcher = await cluster.start()
    cluster.decode[0].token_s = 0.01
    task = await tools.streaming(dispatcher, PROMPT, max_tokens=40)
    await tools.until(lambda: dispatcher.load().stages["decode"])
    cluster.decode[0].die()
    await cluster.decode[0].restart()
    assert (await task)[0] == tools.expected(PROMPT, 40)


@pytest.mark.slow
async def test_a_new_epoch_on_a_living_connection_is_a_new_worker(cluster, tools):
    dispatcher = await cluster.start()
    cluster.decode[0].token_s = 0.01
    task = await tools.streaming(dispatcher, PROMPT, max_tokens=40)
    await tools.until(lambda: dispatcher.load().stages["decode"])
    cluster.decode[0].jobs.clear()
    cluster.decode[0].epoch += 1_000_000
    assert (await task)[0] == tools.expected(PROMPT, 40)
    assert dispatcher.load().num_retries == {"decode": 1}


async def test_a_worker_that_lost_this_router_is_greeted_anew_and_its_streams_move(cluster, tools):
    """It was frozen for longer than routers may be silent, though not for as long as workers may."""
    dispatcher = await cluster.start(decode=2, worker_timeout_s=60.0)
    for worker in cluster.decode:
        worker.token_s = 0.01
    rest = await tools.streaming(dispatcher, PROMPT, max_tokens=60)
    await tools.until(lambda: dispatcher.load().stages["decode"])
    first = busy(cluster.decode)
    (router,) = first.routers
    first.jobs.clear()
    first.routers.clear()
    for _ in range(3):
        first.send(router, replace(first.hello_message(), lost_router=True))
    tokens, last = await rest
    assert tokens == tools.expected(PROMPT, 60)
    assert last.timeline.num_attempts == 2 and last.timeline.decode_worker != first.worker_id
    await tools.until(lambda: set(first.routers) == {router})
    await tools.until(lambda: len(dispatcher.fleet.registry.ready("decode")) == 2)


async def test_a_silent_decode_worker_is_left_and_its_late_words_ignored(cluster, tools):
    dispatcher = await cluster.start(decode=2, worker_timeout_s=tools.SILENT_S)
    for worker in cluster.decode:
        worker.token_s = 0.02
    task = await tools.streaming(dispatcher, PROMPT, max_tokens=60)
    await tools.until(lambda: dispatcher.load().stages["decode"])
    frozen = busy(cluster.decode)
    frozen.beating, frozen.token_s = False, 0.5
    tokens, last = await task
    assert tokens == tools.expected(PROMPT, 60)
    assert last.timeline.num_attempts > 1
    frozen.beating = True
    await tools.until(lambda: len(dispatcher.fleet.registry.ready("decode")) == 2)
    await tools.until(lambda: frozen.of(AbortRequest))


async def test_an_engine_that_stands_still_is_dead_until_it_moves(cluster, tools):
    dispatcher = await cluster.start(prefill=0)
    worker = cluster.decode[0]
    worker.beat |= {"step": 7, "turn_limit_s": 0.2}
    await tools.until(lambda: "(step 7)" in dispatcher.ready[1])
    worker.beat.clear()
    await tools.until(lambda: dispatcher.ready[0])


async def test_a_prefill_worker_that_fails_everything_soon_gets_nothing(cluster, tools, monkeypatch):
    monkeypatch.setattr(fleet_worker, "SUSPECT_S", 3600.0)
    monkeypatch.setattr(fleet_worker, "MAX_SUSPECT_S", 3600.0)
    dispatcher = await cluster.start(prefill=2)
    bad = cluster.prefill[0]
    bad.on_request = bad.fail
    for start in range(12):
        prompt = [start, *PROMPT]
        assert (await tools.collect(dispatcher, tools.request(prompt)))[0] == tools.expected(prompt, 8)
    assert dispatcher.load().num_retries == {"prefill": 3}
    assert len(bad.of(PrefillRequest)) == 3


async def test_a_failure_of_decode_moves_to_the_other(cluster, tools):
    dispatcher = await cluster.start(decode=2)
    for worker in cluster.decode:
        worker.on_request = lambda router, message, worker=worker: message.attempt == 0 and worker.fail(router, message)
    tokens, last = await tools.collect(dispatcher, tools.request(PROMPT))
    assert tokens == tools.expected(PROMPT, 8)
    assert last.timeline.num_attempts == 2
    assert [len(worker.of(DecodeRequest)) for worker in cluster.decode] == [1, 1]


async def test_retries_are_bounded(cluster, tools):
    dispatcher = await cluster.start(decode=2, max_retries=2)
    for worker in cluster.decode:
        worker.on_request = worker.fail
    with pytest.raises(Unavailable, match="Gave up after 3 attempts; .* scripted"):
        await tools.collect(dispatcher, tools.request(PROMPT))
    assert sum(len(worker.of(DecodeRequest)) for worker in cluster.decode) == 3


@pytest.mark.parametrize("phase", ["queue", "grammar"])
async def test_a_refusal_for_good_is_not_retried(cluster, tools, phase):
    """It is the request's fault: a 5xx would have its client try again."""
    dispatcher = await cluster.start()
    bad = cluster.prefill[0]
    bad.on_request = lambda router, message: bad.fail(
        router, message, retryable=False, text="prompt has 9 tokens too many", phase=phase
    )
    with pytest.raises(InvalidRequest, match="9 tokens too many"):
        await tools.collect(dispatcher, tools.request(PROMPT))
    assert len(bad.of(PrefillRequest)) == 1
    await tools.until(lambda: cluster.decode[0].of(AbortRequest))


async def test_an_abort_by_the_worker_is_a_failure(cluster, tools):
    dispatcher = await cluster.start(prefill=0, decode=2)

    def abort(worker, router, message):
        if message.attempt == 0:
            worker.output(router, message, 0, [], "abort")
        return message.attempt == 0

    for worker in cluster.decode:
        worker.on_request = lambda router, message, worker=worker: abort(worker, router, message)
    assert (await tools.collect(dispatcher, tools.request(PROMPT)))[0] == tools.expected(PROMPT, 8)


async def test_a_worker_that_contradicts_what_was_sent_is_left(cluster, tools):
    dispatcher = await cluster.start(decode=2)
    held = []
    for worker in cluster.decode:
        worker.on_request = lambda *call, worker=worker: call[1].attempt == 0 and not held.append((worker, *call))
    stream = dispatcher.generate(tools.request(PROMPT))
    seen = list((await anext(stream)).token_ids)
    liar, router, message = held[0]
    liar.output(router, message, 0, [998, 999])
    seen += [token async for event in stream for token in event.token_ids]
    assert seen == tools.expected(PROMPT, 8)


@pytest.mark.slow
async def test_a_lost_delta_is_noticed(cluster, tools):
    dispatcher = await cluster.start(prefill=0, decode=2)

    def skip(worker, router, message):
        if message.attempt == 0:
            worker.output(router, message, 3, [1, 2])
        return message.attempt == 0

    for worker in cluster.decode:
        worker.on_request = lambda router, message, worker=worker: skip(worker, router, message)
    assert (await tools.collect(dispatcher, tools.request(PROMPT)))[0] == tools.expected(PROMPT, 8)


@pytest.mark.slow
async def test_a_worker_that_lost_the_request_is_noticed(cluster, tools):
    dispatcher = await cluster.start(prefill=0, decode=2)
    for worker in cluster.decode:
        worker.on_request = lambda router, message: message.attempt == 0
    tokens, last = await tools.collect(dispatcher, tools.request(PROMPT))
    assert tokens == tools.expected(PROMPT, 8)
    assert last.timeline.num_attempts == 2


@pytest.mark.slow
async def test_deltas_of_strangers_and_old_attempts_are_ignored(cluster, tools):
    dispatcher = await cluster.start(decode=2)
    for worker in cluster.decode:
        worker.token_s = 0.01
    request = tools.request(PROMPT, max_tokens=20)
    stream = dispatcher.generate(request)
    await anext(stream)
    await tools.until(lambda: dispatcher.load().stages["decode"])
    owner = busy(cluster.decode)
    stranger = next(worker for worker in cluster.decode if worker is not owner)
    (router,) = stranger.routers
    for worker, attempt, epoch in ((stranger, 0, 0), (owner, 5, 0), (owner, 0, 1)):
        delta = TokenDelta(request.request_id, attempt, 1, (777,), "stop")
        output = TokenOutput(worker_id=worker.worker_id, epoch=worker.epoch + epoch, outputs=(delta,))
        worker.send(router, output)
    tokens = [token async for event in stream for token in event.token_ids]
    assert 777 not in tokens
    await tools.until(lambda: dispatcher.load().num_stale_deltas == 3)


async def test_malformed_frames_are_counted_and_dropped(cluster, tools):
    dispatcher = await cluster.start()
    worker = cluster.decode[0]
    (router,) = worker.routers
    for frames in ([b"\xff\xff"], [b""], [b"a", b"b"], [encode(AbortRequest(request_id="x", attempt=0))]):
        worker.socket.send_multipart([router, *frames])
    assert (await tools.collect(dispatcher, tools.request(PROMPT)))[0] == tools.expected(PROMPT, 8)
    await tools.until(lambda: dispatcher.fleet.connections[worker.address].drops.num_dropped == 4)
    assert dispatcher.ready == (True, "")


@pytest.mark.slow
async def test_a_draining_worker_gets_nothing_new_and_finishes(cluster, tools):
    dispatcher = await cluster.start(decode=2)
    for worker in cluster.decode:
        worker.token_s = 0.01
    task = await tools.streaming(dispatcher, PROMPT, max_tokens=30)
    await tools.until(lambda: dispatcher.load().stages["decode"])
    leaving = busy(cluster.decode)
    leaving.beat["draining"] = True
    await tools.until(lambda: len(dispatcher.fleet.registry.ready("decode")) == 1)
    for _ in range(4):
        await tools.collect(dispatcher, tools.request(PROMPT, max_tokens=2))
    assert (await task)[0] == tools.expected(PROMPT, 30)
    assert len(leaving.of(DecodeRequest)) == 1


async def test_a_worker_that_does_not_read_is_passed_over(cluster, tools):
    dispatcher = await cluster.start(prefill=0, decode=2)
    unreachable, healthy = cluster.decode
    send = dispatcher.fleet.send
    dispatcher.core._placement._send = lambda address, message: (
        address != unreachable.address and send(address, message)
    )
    for _ in range(3):
        assert (await tools.collect(dispatcher, tools.request(PROMPT)))[0] == tools.expected(PROMPT, 8)
    assert unreachable.of(DecodeRequest) == []
    assert len(healthy.of(DecodeRequest)) == 3


async def test_prefill_that_takes_no_messages_leaves_decode_alone(cluster, tools):
    dispatcher = await cluster.start()
    unreachable, send = cluster.prefill[0], dispatcher.fleet.send
    dispatcher.core._placement._send = lambda address, message: (
        address != unreachable.address and send(address, message)
    )
    assert (await tools.collect(dispatcher, tools.request(PROMPT)))[0] == tools.expected(PROMPT, 8)
    assert [message.prefill_worker for message in cluster.decode[0].of(DecodeRequest)] == [unreachable.worker_id, ""]


async def test_workers_killed_at_random_under_load(cluster, tools):
    dispatcher = await cluster.start(prefill=2, decode=2, max_retries=20)
    for worker in cluster.workers:
        worker.token_s = 0.005
    prompts = [[i, *range(2, 12)] for i in range(1, 41)]
    work = [asyncio.create_task(tools.collect(dispatcher, tools.request(p, max_tokens=40))) for p in prompts]
    for victim in (cluster.decode[0], cluster.prefill[1], cluster.decode[1], cluster.prefill[0]):
        await asyncio.sleep(0.05)
        victim.die()
        await asyncio.sleep(0.05)
        await victim.restart()
        await tools.until(lambda victim=victim: dispatcher.fleet.registry.workers[victim.address].ready)
    assert [tokens for tokens, _ in await asyncio.gather(*work)] == [tools.expected(p, 40) for p in prompts]
    await tools.until(lambda: not any(worker.num_booked_requests for worker in dispatcher.load().workers))


async def test_a_draining_decode_worker_is_not_asked_to_begin_again(cluster, tools):
    """It refuses new attempts: the loss of the prefill worker alone would count as two failures."""
    dispatcher = await cluster.start(prefill=1)
    cluster.prefill[0].token_s = 30.0
    task = asyncio.create_task(tools.collect(dispatcher, tools.request(PROMPT)))
    await tools.until(lambda: cluster.prefill[0].of(PrefillRequest))
    cluster.decode[0].beat["draining"] = True
    await tools.until(lambda: not dispatcher.fleet.registry.ready("decode"))
    cluster.prefill[0].die()
    await tools.until(lambda: dispatcher.load().stages["queue"])
    cluster.decode[0].beat.clear()
    tokens, last = await task
    assert tokens == tools.expected(PROMPT, 8)
    assert last.timeline.num_attempts == 2
    assert len(cluster.decode[0].of(DecodeRequest)) == 2


async def test_a_decode_worker_that_ended_before_it_read_of_another_attempt_forgets_that(cluster, tools):
    """Its answer is complete. It would wait for KV that no one sends until the request's time is over."""
    dispatcher = await cluster.start(prefill=2)
    (decode,) = cluster.decode
    held = []
    decode.on_request = lambda router, message: held.append((router, message)) or True
    task = asyncio.create_task(tools.collect(dispatcher, tools.request(PROMPT)))
    await tools.until(lambda: held and any(worker.of(PrefillRequest) for worker in cluster.prefill))
    for worker in cluster.prefill:
        worker.on_request = lambda router, message: True
    next(worker for worker in cluster.prefill if worker.of(PrefillRequest)).die()
    await tools.until(lambda: len(held) == 2)
    router, first = held[0]
    decode.output(router, first, 0, tools.expected(PROMPT, 8), "length")
    assert (await task)[0] == tools.expected(PROMPT, 8)
    await tools.until(lambda: any(message.attempt == 1 for message in decode.of(AbortRequest)))


@pytest.mark.slow
async def test_lost_tokens_of_a_decode_worker_are_not_its_prefill_workers(cluster, tools):
    """The first token is lost on both ways. The prefill worker has no more part in it, and cannot send it again."""
    dispatcher = await cluster.start(decode=2)
    cluster.prefill[0].on_request = lambda router, message: message.attempt == 0

    def skip(worker, router, message):
        if message.attempt == 0:
            worker.output(router, message, 1, [1, 2])
        return message.attempt == 0

    for worker in cluster.decode:
        worker.on_request = lambda router, message, worker=worker: skip(worker, router, message)
    tokens, last = await tools.collect(dispatcher, tools.request(PROMPT))
    assert tokens == tools.expected(PROMPT, 8)
    assert last.timeline.num_attempts == 2
    assert dispatcher.load().num_retries == {"decode": 1}

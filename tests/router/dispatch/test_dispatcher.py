"""The dispatcher on real sockets when all goes well, and at its bounds."""

import asyncio
import subprocess
import sys
from collections import Counter

import msgspec
import pytest
import uvloop

from common.errors import DeadlineExceeded, InvalidRequest, Unavailable
from common.wire.messages import AbortRequest, DecodeRequest, PrefillRequest, ResetPrefixCache
from router.dispatch.request_scheduler import MAX_PLACED_A_TURN

PROMPT = list(range(1, 13))


async def test_tokens_of_both_workers_make_one_stream(cluster, tools):
    dispatcher = await cluster.start()
    tokens, last = await tools.collect(dispatcher, tools.request(PROMPT))
    assert tokens == tools.expected(PROMPT, 8)
    assert last.finish_reason == "length"


async def test_both_workers_get_the_same_request(cluster, tools):
    dispatcher = await cluster.start()
    await tools.collect(dispatcher, tools.request(PROMPT))
    (prefill,), (decode,) = cluster.prefill[0].of(PrefillRequest), cluster.decode[0].of(DecodeRequest)
    assert (prefill.request_id, prefill.attempt, prefill.prompt) == (decode.request_id, decode.attempt, decode.prompt)
    assert decode.prefill_worker == cluster.prefill[0].worker_id
    assert prefill.decode.worker_id == cluster.decode[0].worker_id
    assert prefill.decode.epoch == cluster.decode[0].epoch


async def test_timeline_names_workers_and_their_durations(cluster, tools):
    dispatcher = await cluster.start()
    # Long enough that the prefill worker is heard before the end: the decode worker may be heard first.
    _, last = await tools.collect(dispatcher, tools.request(PROMPT, max_tokens=200))
    line = last.timeline
    assert (line.prefill_worker, line.decode_worker) == (cluster.prefill[0].worker_id, cluster.decode[0].worker_id)
    assert (line.num_attempts, line.prefill_s, line.decode_s) == (1, 0.5, 0.25)


async def test_first_token_does_not_wait_for_the_decode_worker(cluster, tools):
    dispatcher = await cluster.start()
    cluster.decode[0].serving = False
    stream = dispatcher.generate(tools.request(PROMPT))
    event = await anext(stream)
    assert event.token_ids == tuple(tools.expected(PROMPT, 1))
    assert dispatcher.load().stages["transfer"] == 1
    assert (event.timeline.prefill_worker, event.timeline.prefill_s) == (cluster.prefill[0].worker_id, 0.5)
    await stream.aclose()


async def test_a_sink_gets_each_event_but_the_last_in_its_turn(cluster, tools):
    """Events that it leaves, and the one that ends the answer, come by `generate`, none twice and none out of order."""
    dispatcher = await cluster.start()
    taken: list[int] = []
    ways: list[str] = []

    def sink(event) -> bool:
        takes = len(taken) % 3 != 2 or bool(ways) and ways[-1] == "left"
        ways.append("sunk" if takes else "left")
        if takes:
            taken.extend(event.token_ids)
        return takes

    request = tools.request(PROMPT, max_tokens=300)
    async for event in dispatcher.generate(msgspec.structs.replace(request, sink=sink)):
        taken.extend(event.token_ids)
    assert taken == tools.expected(PROMPT, 300)
    assert event.finish_reason == "length" and {"sunk", "left"} == set(ways)


async def test_a_sink_that_fails_ends_its_own_answer(cluster, tools):
    dispatcher = await cluster.start()

    def sink(event) -> bool:
        raise ZeroDivisionError

    request = tools.request(PROMPT, max_tokens=300)
    with pytest.raises(ZeroDivisionError):
        async for _ in dispatcher.generate(msgspec.structs.replace(request, sink=sink)):
            pass
    assert (await tools.collect(dispatcher, tools.request(PROMPT)))[0] == tools.expected(PROMPT, 8)
    await tools.until(lambda: not dispatcher.core.states)


async def test_decode_worker_may_be_heard_first(cluster, tools):
    dispatcher = await cluster.start()
    kv = [*PROMPT, *tools.expected(PROMPT, 1)]
    cluster.prefill[0].on_request = lambda router, message: (
        cluster.ship(message.request_id, message.attempt, message.decode, kv) or True
    )
    tokens, _ = await tools.collect(dispatcher, tools.request(PROMPT))
    assert tokens == tools.expected(PROMPT, 8)


async def test_one_token_needs_no_decode_worker(cluster, tools):
    dispatcher = await cluster.start()
    tokens, last = await tools.collect(dispatcher, tools.request(PROMPT, max_tokens=1))
    assert (tokens, last.finish_reason) == (tools.expected(PROMPT, 1), "length")
    assert cluster.prefill[0].of(PrefillRequest)[0].decode is None
    assert cluster.decode[0].of(DecodeRequest) == []


async def test_one_token_without_prefill_workers_runs_on_decode(cluster, tools):
    dispatcher = await cluster.start(prefill=0)
    tokens, _ = await tools.collect(dispatcher, tools.request(PROMPT, max_tokens=1))
    assert tokens == tools.expected(PROMPT, 1)


async def test_stop_at_the_first_token_releases_both_workers(cluster, tools):
    """The prefill worker, too: the decode worker may have forgotten the request when its KV is offered."""
    dispatcher = await cluster.start()
    cluster.prefill[0].stop_at = 1
    tokens, last = await tools.collect(dispatcher, tools.request(PROMPT))
    assert (len(tokens), last.finish_reason) == (1, "stop")
    await tools.until(lambda: cluster.decode[0].of(AbortRequest) and cluster.prefill[0].of(AbortRequest))


async def test_no_prefill_workers_means_local_prefill(cluster, tools):
    dispatcher = await cluster.start(prefill=0)
    tokens, last = await tools.collect(dispatcher, tools.request(PROMPT))
    assert tokens == tools.expected(PROMPT, 8)
    assert cluster.decode[0].of(DecodeRequest)[0].prefill_worker == ""
    assert last.timeline.prefill_worker == ""


async def test_short_prompt_is_prefilled_locally(cluster, tools):
    dispatcher = await cluster.start()
    await tools.collect(dispatcher, tools.request([1, 2, 3]))
    assert cluster.prefill[0].of(PrefillRequest) == []
    assert dispatcher.load().num_choices == {"local": 1}


async def test_a_prompt_that_decode_has_cached_is_prefilled_locally(cluster, tools):
    dispatcher = await cluster.start()
    first, _ = await tools.collect(dispatcher, tools.request(PROMPT))
    await tools.collect(dispatcher, tools.request(PROMPT + first[:4]))
    assert len(cluster.prefill[0].of(PrefillRequest)) == 1


async def test_reset_forgets_what_workers_cached(cluster, tools):
    dispatcher = await cluster.start()
    first, _ = await tools.collect(dispatcher, tools.request(PROMPT))
    dispatcher.reset_prefix_cache()
    await tools.until(lambda: cluster.decode[0].of(ResetPrefixCache) and cluster.prefill[0].of(ResetPrefixCache))
    await tools.collect(dispatcher, tools.request(PROMPT + first[:4]))
    assert len(cluster.prefill[0].of(PrefillRequest)) == 2


async def test_unequal_fingerprints_are_never_paired(cluster, tools):
    cluster.add("prefill", fingerprint="other")
    dispatcher = await cluster.start(prefill=0)
    tokens, _ = await tools.collect(dispatcher, tools.request(PROMPT))
    assert tokens == tools.expected(PROMPT, 8)
    assert cluster.prefill[0].of(PrefillRequest) == []


async def test_closing_the_stream_aborts_on_both_workers(cluster, tools):
    dispatcher = await cluster.start()
    cluster.decode[0].token_s = 0.05
    stream = dispatcher.generate(tools.request(PROMPT, max_tokens=1000))
    await anext(stream)
    await stream.aclose()
    await tools.until(lambda: cluster.decode[0].of(AbortRequest) and cluster.prefill[0].of(AbortRequest))
    assert sum(dispatcher.load().stages.values()) == 0
    assert all(worker.num_booked_requests == 0 for worker in dispatcher.load().workers)


async def test_cancelling_the_consumer_aborts(cluster, tools):
    dispatcher = await cluster.start()
    cluster.prefill[0].serving = False
    task = asyncio.create_task(tools.collect(dispatcher, tools.request(PROMPT)))
    await tools.until(lambda: cluster.prefill[0].of(PrefillRequest))
    task.cancel()
    await tools.until(lambda: cluster.prefill[0].of(AbortRequest) and cluster.decode[0].of(AbortRequest))


async def test_a_deadline_names_its_phase_and_aborts(cluster, tools):
    dispatcher = await cluster.start()
    cluster.prefill[0].serving = False
    with pytest.raises(DeadlineExceeded, match=r"0\.1 s .* prefill phase"):
        await tools.collect(dispatcher, tools.request(PROMPT, deadline_s=0.1))
    await tools.until(lambda: cluster.decode[0].of(AbortRequest))


async def test_a_deadline_in_transfer_comes_after_the_first_token(cluster, tools):
    dispatcher = await cluster.start()
    cluster.decode[0].serving = False
    stream = dispatcher.generate(tools.request(PROMPT, deadline_s=60.0))
    assert len((await anext(stream)).token_ids) == 1
    (state,) = dispatcher.core.states.values()
    dispatcher.core._on_deadline(state)
    with pytest.raises(DeadlineExceeded, match="transfer phase"):
        await anext(stream)


async def test_a_deadline_in_the_queue(cluster, tools):
    dispatcher = await cluster.start(decode=0, prefill=0)
    with pytest.raises(DeadlineExceeded, match="queue phase"):
        await tools.collect(dispatcher, tools.request(PROMPT, deadline_s=0.1))


async def test_without_decode_workers_requests_wait_then_fail(cluster, tools):
    cluster.add("decode").beat["ready"] = False
    dispatcher = await cluster.start(decode=0, wait=False, queue_timeout_s=0.2)
    with pytest.raises(Unavailable, match="no decode worker is ready") as caught:
        await tools.collect(dispatcher, tools.request(PROMPT))
    assert caught.value.retry_after_s


async def test_waiting_requests_are_served_once_a_worker_is_ready(cluster, tools):
    worker = cluster.add("decode")
    worker.beat["ready"] = False
    dispatcher = await cluster.start(prefill=0, decode=0, wait=False)
    task = asyncio.create_task(tools.collect(dispatcher, tools.request(PROMPT)))
    await tools.until(lambda: dispatcher.load().stages["queue"] == 1)
    worker.beat["ready"] = True
    assert (await task)[0] == tools.expected(PROMPT, 8)


async def test_no_more_than_max_inflight(cluster, tools):
    dispatcher = await cluster.start(max_inflight=1)
    cluster.decode[0].serving = False
    stream = dispatcher.generate(tools.request(PROMPT))
    await anext(stream)
    with pytest.raises(Unavailable, match="1 requests are in flight"):
        await tools.collect(dispatcher, tools.request(PROMPT))
    with pytest.raises(Unavailable, match="1 requests are in flight"):
        dispatcher.check_room(lambda num_tokens: False)
    await stream.aclose()
    dispatcher.check_room(lambda num_tokens: True)


async def test_a_request_id_is_served_once_at_a_time(cluster, tools):
    dispatcher = await cluster.start()
    cluster.decode[0].serving = False
    request = tools.request(PROMPT)
    stream = dispatcher.generate(request)
    await anext(stream)
    with pytest.raises(InvalidRequest, match="already"):
        await tools.collect(dispatcher, request)
    await stream.aclose()


@pytest.mark.parametrize("prompt", [[-1], [2**32], ["a"]])
async def test_a_prompt_of_no_token_ids_is_refused(cluster, tools, prompt):
    dispatcher = await cluster.start()
    with pytest.raises(InvalidRequest, match="Invalid token id"):
        await tools.collect(dispatcher, tools.request(prompt))
    assert sum(dispatcher.load().stages.values()) == 0


async def test_many_requests_at_once(cluster, tools):
    dispatcher = await cluster.start(prefill=2, decode=2)
    prompts = [[i, *range(2, 10 + i % 7)] for i in range(1, 201)]
    results = await asyncio.gather(*(tools.collect(dispatcher, tools.request(p, max_tokens=6)) for p in prompts))
    assert [tokens for tokens, _ in results] == [tools.expected(p, 6) for p in prompts]
    assert all(worker.num_booked_requests == 0 for worker in dispatcher.load().workers)
    shares = [len(worker.of(DecodeRequest)) for worker in cluster.decode]
    assert min(shares) > 60


async def test_an_abort_storm_leaves_nothing_behind(cluster, tools):
    dispatcher = await cluster.start(prefill=2, decode=2)
    for worker in cluster.workers:
        worker.token_s = 0.05
    prompts = [[i, *range(2, 12)] for i in range(1, 201)]
    tasks = [asyncio.create_task(tools.collect(dispatcher, tools.request(p, max_tokens=500))) for p in prompts]
    await tools.until(lambda: dispatcher.load().stages["decode"] > 100)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not any(worker.num_booked_requests for worker in dispatcher.load().workers)
    await tools.until(lambda: not any(worker.jobs for worker in cluster.decode))
    assert (await tools.collect(dispatcher, tools.request(PROMPT)))[0] == tools.expected(PROMPT, 8)


async def test_a_slow_reader_gets_everything_in_fewer_events(cluster, tools):
    dispatcher = await cluster.start()
    stream = dispatcher.generate(tools.request(PROMPT, max_tokens=50))
    tokens = list((await anext(stream)).token_ids)
    state = next(iter(dispatcher.core.states.values()))
    await tools.until(lambda: state.done)
    rest = [event.token_ids async for event in stream]
    assert len(rest) <= 1
    assert tokens + [token for event in rest for token in event] == tools.expected(PROMPT, 50)


async def test_ready_says_what_is_missing(cluster, tools):
    worker = cluster.add("decode")
    worker.beating = False
    dispatcher = await cluster.start(prefill=0, decode=0, wait=False, worker_timeout_s=tools.SILENT_S)
    await tools.until(lambda: "silent" in dispatcher.ready[1])
    ready, why = dispatcher.ready
    assert not ready
    assert why.startswith(
        f"no decode worker is ready (1 configured: worker {worker.worker_id}: silent for more than 0.3 s"
    )


async def test_max_model_len_is_that_of_the_smallest_worker(cluster):
    cluster.add("decode", max_model_len=128)
    dispatcher = await cluster.start()
    assert dispatcher.max_model_len == 128


async def test_close_ends_streams_at_once(cluster, tools):
    dispatcher = await cluster.start()
    cluster.decode[0].serving = False
    stream = dispatcher.generate(tools.request(PROMPT))
    await anext(stream)
    async with asyncio.timeout(10.0):  # and the request itself has 30
        await dispatcher.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await anext(stream)
    await tools.until(lambda: cluster.decode[0].of(AbortRequest))


async def test_a_dead_task_makes_the_router_not_ready(cluster, tools):
    dispatcher = await cluster.start()
    dispatcher.fleet._listener = None
    await tools.until(lambda: not dispatcher.ready[0])
    assert "fleet: tick" in dispatcher.ready[1]


def test_it_runs_on_uvloop(tools):
    async def serve():
        cluster = tools.cluster()
        try:
            return await tools.collect(await cluster.start(), tools.request(PROMPT))
        finally:
            await cluster.close()

    assert uvloop.run(serve())[0] == tools.expected(PROMPT, 8)


def test_importing_the_dispatcher_loads_no_torch():
    code = "import sys, router.dispatch.dispatcher; print([m for m in ('torch', 'triton') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"


async def test_a_long_queue_is_placed_without_holding_the_event_loop(cluster, tools, monkeypatch):
    dispatcher = await cluster.start(prefill=0)
    cluster.decode[0].die()
    await tools.until(lambda: not dispatcher.fleet.registry.ready("decode"))
    tasks = [asyncio.create_task(tools.collect(dispatcher, tools.request(PROMPT))) for _ in range(100)]
    await tools.until(lambda: len(dispatcher.core.waiting) == 100)
    turn, turns, place = 0, [], dispatcher.core._placement.place

    def noted(state, now, chosen=None):
        placed = place(state, now, chosen)
        if placed:
            turns.append(turn)
        return placed

    async def count():
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    monkeypatch.setattr(dispatcher.core._placement, "place", noted)
    await cluster.decode[0].restart()
    for task in tasks:
        assert (await task)[0] == tools.expected(PROMPT, 8)
    counting.cancel()
    assert max(Counter(turns).values()) <= 2 * MAX_PLACED_A_TURN  # a tick may come in the same turn

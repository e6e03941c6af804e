"""Prompts that honestly take longer than the deadline of their phase: who says that he makes progress is waited for."""

import asyncio

import pytest

from common.wire.messages import PrefillRequest

pytestmark = pytest.mark.slow

PROMPT = list(range(1, 13))
LIMIT_S = 0.4


def slow(worker, *, words, says_s=0.1):
    """Its first token comes after `words` words of progress."""

    async def work(router, message):
        for _ in range(words):
            worker.output(router, message, message.num_output_tokens, [])
            await asyncio.sleep(says_s)
        worker.start(router, message)

    def begin(router, message):
        worker.spawn(work(router, message))
        return True

    worker.on_request = begin
    worker.beat["num_running"] = 1


async def test_a_long_prompt_is_computed_once(cluster, tools):
    dispatcher = await cluster.start(prefill=2, prefill_timeout_s=LIMIT_S)
    for worker in cluster.prefill:
        slow(worker, words=15)
    tokens, last = await tools.collect(dispatcher, tools.request(PROMPT))
    assert tokens == tools.expected(PROMPT, 8)
    assert last.timeline.num_attempts == 1
    assert sum(len(worker.of(PrefillRequest)) for worker in cluster.prefill) == 1


async def test_a_decode_worker_that_computes_it_is_waited_for_too(cluster, tools):
    dispatcher = await cluster.start(prefill=0, decode=2, prefill_timeout_s=LIMIT_S)
    for worker in cluster.decode:
        slow(worker, words=15)
    tokens, last = await tools.collect(dispatcher, tools.request(PROMPT))
    assert tokens == tools.expected(PROMPT, 8)
    assert last.timeline.num_attempts == 1


async def test_a_transfer_that_goes_on_is_waited_for(cluster, tools):
    dispatcher = await cluster.start(decode=2, token_timeout_s=LIMIT_S)
    for worker in cluster.decode:
        slow(worker, words=15)
    tokens, last = await tools.collect(dispatcher, tools.request(PROMPT))
    assert tokens == tools.expected(PROMPT, 8)
    assert last.timeline.num_attempts == 1


async def test_words_of_progress_that_end_are_a_silence(cluster, tools):
    """The worker lost it in the middle; others still keep it busy."""
    dispatcher = await cluster.start(prefill=2, prefill_timeout_s=LIMIT_S)
    for worker in cluster.prefill:
        worker.on_request = lambda router, message, worker=worker: (
            message.attempt == 0 and (worker.output(router, message, 0, []) or True)
        )
        worker.beat["num_running"] = 1
    tokens, last = await tools.collect(dispatcher, tools.request(PROMPT))
    assert tokens == tools.expected(PROMPT, 8)
    assert last.timeline.num_attempts == 2


async def test_the_words_of_one_that_is_not_waited_for_renew_nothing(cluster, tools):
    """The decode worker has nothing to say of the prefill worker's work."""
    dispatcher = await cluster.start(prefill=2, prefill_timeout_s=LIMIT_S)
    (decode,) = cluster.decode
    talk = []

    async def talking(router, message):
        while True:
            decode.output(router, message, 0, [])
            await asyncio.sleep(0.05)

    def begin(router, message):
        talk.append(asyncio.create_task(talking(router, message)))
        return False

    decode.on_request = begin
    for worker in cluster.prefill:
        worker.on_request = lambda router, message: message.attempt == 0
        worker.beat["num_running"] = 1
    tokens, last = await tools.collect(dispatcher, tools.request(PROMPT))
    for task in talk:
        task.cancel()
    assert tokens == tools.expected(PROMPT, 8)
    assert last.timeline.num_attempts == 2


async def test_progress_does_not_outlast_the_request(cluster, tools):
    from common.errors import DeadlineExceeded

    dispatcher = await cluster.start(prefill_timeout_s=LIMIT_S)
    slow(cluster.prefill[0], words=1000)
    with pytest.raises(DeadlineExceeded, match="in its prefill phase"):
        await tools.collect(dispatcher, tools.request(PROMPT, deadline_s=1.0))


async def test_progress_is_no_token(cluster, tools):
    """A wait that is renewed is as long a wait: predictions for others see all of it."""
    dispatcher = await cluster.start(prefill_timeout_s=LIMIT_S)
    slow(cluster.prefill[0], words=1000)
    task = asyncio.create_task(tools.collect(dispatcher, tools.request(PROMPT)))
    await tools.until(
        lambda: any(f.times.renewed_at > f.times.progress_at + LIMIT_S for f in dispatcher.core.states.values())
    )
    (state,) = dispatcher.core.states.values()
    assert state.stage == "prefill" and not state.attempts.prefill.delivered
    assert dispatcher.fleet.registry.workers[state.attempts.prefill.address].bookings.total.num_tokens
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

"""Honest workers that round differently: a token that one computes anew may differ from the one that was sent."""

import asyncio

import pytest

from common.errors import FatalRequest
from common.wire.message_fields import unpack_tokens
from common.wire.messages import DecodeRequest, PrefillRequest, TokenDelta
from common.wire.sampling_params import TokenLogprobs

PROMPT = list(range(1, 13))
ROUNDED = 5
"""What the worker that dies says instead of the scripted model's first token."""


def strikes(dispatcher):
    return [worker.life.num_consecutive_failures for worker in dispatcher.fleet.registry.workers.values()]


async def begun_by_one_that_dies(cluster, tools, num_prefill):
    """A stream that a prefill worker began with a token of its own, and the task that collects its rest.

    The worker has died since, and its KV did not arrive.
    """
    dispatcher = await cluster.start(prefill=num_prefill)
    cluster.ship, ship = (lambda *kv: None), cluster.ship

    def round_differently(worker, router, message):
        worker.output(router, message, message.num_output_tokens, [ROUNDED])
        return True

    for worker in cluster.prefill:
        worker.on_request = lambda router, message, worker=worker: round_differently(worker, router, message)
    task = await tools.streaming(dispatcher, PROMPT)
    victim = next(worker for worker in cluster.prefill if worker.of(PrefillRequest))
    for worker in cluster.prefill:
        worker.on_request = lambda router, message: False
    cluster.ship = ship
    victim.die()
    return dispatcher, task


@pytest.mark.parametrize("num_prefill", [1, 2, 3, 5])
async def test_the_replacement_of_a_dead_prefill_worker_computes_another_first_token(cluster, tools, num_prefill):
    """With one, the decode worker computes the prompt itself, and rounds differently too."""
    dispatcher, task = await begun_by_one_that_dies(cluster, tools, num_prefill)
    tokens, last = await task
    assert tokens == [ROUNDED, *tools.expected([*PROMPT, ROUNDED], 7)]
    assert last.timeline.num_attempts == 2  # one worker failed, and only one
    assert not any(strikes(dispatcher))
    assert dispatcher.load().num_retries == {"prefill": 1}
    assert not any(worker.bookings for worker in dispatcher.fleet.registry.workers.values())
    again = cluster.decode[0].of(DecodeRequest)[-1]
    assert (again.num_output_tokens, unpack_tokens(again.prompt)) == (1, [*PROMPT, ROUNDED])


async def test_the_decode_worker_speaks_before_the_replacement(cluster, tools):
    """Its tokens are behind the replacement's first one, and so is the difference."""
    dispatcher = await cluster.start(prefill=2)
    cluster.ship, ship = (lambda *kv: None), cluster.ship
    for worker in cluster.prefill:
        worker.on_request = lambda router, message, worker=worker: worker.output(router, message, 0, [ROUNDED]) or True
    task = await tools.streaming(dispatcher, PROMPT)
    victim, other = sorted(cluster.prefill, key=lambda worker: not worker.of(PrefillRequest))

    def ship_only(router, message):
        if message.attempt != 1:
            return False
        prompt = unpack_tokens(message.prompt)
        ship(message.request_id, message.attempt, message.decode, [*prompt, *tools.expected(prompt, 1)])
        return True

    other.on_request = ship_only
    cluster.ship = ship
    victim.die()
    assert (await task)[0] == [ROUNDED, *tools.expected([*PROMPT, ROUNDED], 7)]
    assert not any(strikes(dispatcher))
    assert dispatcher.load().num_retries == {"prefill": 1}


async def test_a_helper_that_comes_too_late_may_differ(cluster, tools):
    """The KV had arrived: the decode worker goes on with the first token that was sent."""
    dispatcher = await cluster.start(prefill=2)
    decode = cluster.decode[0]
    held = []
    decode.on_request = lambda router, message: held.append((router, message)) or True
    task = await tools.streaming(dispatcher, PROMPT, max_tokens=20)
    victim, other = sorted(cluster.prefill, key=lambda worker: not worker.of(PrefillRequest))
    other.on_request = lambda router, message: True
    victim.die()
    await tools.until(lambda: len(held) == 2 and other.of(PrefillRequest))
    (router, message), tokens = held[1], tools.expected(PROMPT, 20)
    decode.output(router, message, 0, tokens[:3])
    await tools.until(lambda: dispatcher.load().stages["decode"])
    other.output(next(iter(other.routers)), other.of(PrefillRequest)[0], 0, [tokens[0] + 1])
    router_of_other = next(iter(other.routers))
    delta = TokenDelta("a request that is over", 0, 0, (1,))
    other.send_delta(router_of_other, delta)
    await tools.until(lambda: dispatcher.load().num_stale_deltas)  # what was sent before is read by now
    decode.output(router, message, 3, tokens[3:], "length")
    assert (await task)[0] == tokens
    assert not any(strikes(dispatcher))
    assert dispatcher.load().num_retries == {"prefill": 1}


async def test_logprobs_are_those_of_the_tokens_that_were_sent(cluster, tools):
    dispatcher = await cluster.start(prefill=2)
    for worker in cluster.workers:
        worker.output = with_logprobs(worker)
    cluster.ship, ship = (lambda *kv: None), cluster.ship
    for worker in cluster.prefill:
        worker.on_request = lambda router, message, worker=worker: worker.output(router, message, 0, [ROUNDED]) or True
    stream = dispatcher.generate(tools.request(PROMPT, logprobs=0))
    events = [await anext(stream)]
    for worker in cluster.prefill:
        worker.on_request = lambda router, message: False
    cluster.ship = ship
    next(worker for worker in cluster.prefill if worker.of(PrefillRequest)).die()
    events += [event async for event in stream]
    tokens = [token for event in events for token in event.token_ids]
    assert tokens == [ROUNDED, *tools.expected([*PROMPT, ROUNDED], 7)]
    assert [-one.logprob for event in events for one in event.logprobs] == tokens


def with_logprobs(worker):
    """`worker.output`, each token with a log-probability that tells which token it is of."""

    def output(router, message, index, tokens, reason=""):
        logprobs = tuple(TokenLogprobs(-float(token)) for token in tokens)
        delta = TokenDelta(message.request_id, message.attempt, index, tuple(tokens), reason, logprobs=logprobs)
        worker.send_delta(router, delta)

    return output


async def test_two_that_disagree_in_one_attempt_are_at_fault(cluster, tools):
    """The decode worker got the first token from the prefill worker: nothing was computed anew."""
    dispatcher = await cluster.start(decode=2)
    held = []
    for worker in cluster.decode:
        worker.on_request = lambda *call, worker=worker: call[1].attempt == 0 and not held.append((worker, *call))
    task = await tools.streaming(dispatcher, PROMPT)
    liar, router, message = held[0]
    liar.output(router, message, 0, [998, 999])
    tokens, last = await task
    assert tokens == tools.expected(PROMPT, 8)
    assert last.timeline.decode_worker != liar.worker_id
    assert dispatcher.load().num_retries == {"decode": 1}
    assert dispatcher.fleet.registry.workers[liar.address].life.num_consecutive_failures == 1


async def test_a_request_that_kills_its_workers_still_ends(cluster, tools):
    """Each of its prefill workers brings it one token further, which is no progress: its decode workers die."""
    dispatcher = await cluster.start(prefill=1, decode=2, max_retries=3, worker_timeout_s=5.0)
    rebirths = []

    async def die_and_restart(worker):
        worker.die()
        await worker.restart()

    for worker in cluster.decode:
        worker.on_request = lambda router, message, worker=worker: (
            rebirths.append(asyncio.create_task(die_and_restart(worker))) or True
        )
    with pytest.raises(FatalRequest, match="workers that ran this request died"):
        await tools.collect(dispatcher, tools.request(PROMPT, max_tokens=200))
    assert len(rebirths) == 4

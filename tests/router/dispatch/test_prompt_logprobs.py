"""Log-probabilities of prompts: computed by one worker alone, and whole whatever happens to workers."""

import asyncio

import pytest
from msgspec.structs import replace

from common.wire.messages import DecodeRequest, PrefillRequest, PromptLogprobs
from common.wire.sampling_params import TokenLogprobs

PROMPT = list(range(1, 41))
LOGPROBS = tuple(TokenLogprobs(-float(token)) for token in PROMPT[1:])


async def events(dispatcher, tools, **params):
    return [event async for event in dispatcher.generate(tools.request(PROMPT, prompt_logprobs=0, **params))]


def part(worker, message, start, logprobs):
    return PromptLogprobs(
        worker_id=worker.worker_id, epoch=worker.epoch, request_id=message.request_id, attempt=message.attempt,
        start=start, logprobs=logprobs,
    )  # fmt: skip


def tokens(events):
    return [token for event in events for token in event.token_ids]


@pytest.mark.parametrize("max_tokens", [1, 8])
@pytest.mark.parametrize("prefill", [0, 1])
async def test_one_worker_computes_scores_and_answer(cluster, tools, max_tokens, prefill):
    dispatcher = await cluster.start(prefill=prefill)
    first, *later = await events(dispatcher, tools, max_tokens=max_tokens)
    assert first.prompt_logprobs == LOGPROBS
    assert not any(event.prompt_logprobs for event in later)
    assert tokens([first, *later]) == tools.expected(PROMPT, max_tokens)
    asked = [m for worker in cluster.workers for m in (*worker.of(PrefillRequest), *worker.of(DecodeRequest))]
    assert len(asked) == 1
    assert isinstance(asked[0], PrefillRequest) is bool(prefill and max_tokens == 1)


async def test_a_prompt_of_one_token_has_none(cluster, tools):
    dispatcher = await cluster.start()
    found = [event async for event in dispatcher.generate(tools.request([7], prompt_logprobs=3))]
    assert found[0].prompt_logprobs == () and tokens(found) == tools.expected([7], 8)


@pytest.mark.parametrize(("max_tokens", "role"), [(1, "prefill"), (8, "decode")])
async def test_a_worker_that_dies_amid_them(cluster, tools, max_tokens, role):
    dispatcher = await cluster.start(prefill=2, decode=2)
    workers = getattr(cluster, role)
    for worker in workers:

        def begin(router, message, worker=worker):
            """A part of the log-probabilities, and then nothing."""
            worker.send(router, part(worker, message, 1, LOGPROBS[:7]))
            return True

        worker.on_request = begin
    task = asyncio.create_task(events(dispatcher, tools, max_tokens=max_tokens))
    await tools.until(lambda: any(worker.of((PrefillRequest, DecodeRequest)) for worker in workers))
    victim = next(worker for worker in workers if worker.of((PrefillRequest, DecodeRequest)))
    for worker in workers:
        worker.on_request = lambda router, message: False
    victim.die()
    first, *later = await task
    assert first.prompt_logprobs == LOGPROBS
    assert tokens([first, *later]) == tools.expected(PROMPT, max_tokens)


@pytest.mark.parametrize("wrong", ["a gap", "too many", "none"])
async def test_a_worker_whose_logprobs_do_not_fit_is_not_believed(cluster, tools, wrong):
    dispatcher = await cluster.start(prefill=0, decode=2)
    liar, send = cluster.decode[0], cluster.decode[0].send_logprobs

    def lie(router, message, tokens):
        if wrong == "a gap":
            liar.send(router, part(liar, message, 3, LOGPROBS[2:]))
        elif wrong == "too many":
            send(router, message, [*tokens, 1, 2, 3])

    liar.send_logprobs = lie
    for _ in range(4):  # the liar has its turn
        first, *later = await events(dispatcher, tools)
        assert first.prompt_logprobs == LOGPROBS
        assert tokens([first, *later]) == tools.expected(PROMPT, 8)
    assert liar.of(DecodeRequest)
    assert dispatcher.load().num_retries["decode"] >= 1


async def test_logprobs_of_another_life_or_request_count_for_nothing(cluster, tools):
    dispatcher = await cluster.start(prefill=0)
    worker, send = cluster.decode[0], cluster.decode[0].send_logprobs

    def stale(router, message, tokens):
        for change in ({"epoch": worker.epoch + 1}, {"request_id": "nobody"}):
            told = part(worker, message, 1, (TokenLogprobs(-99.0),) * 9)
            worker.send(router, replace(told, **change))
        send(router, message, tokens)

    worker.send_logprobs = stale
    first, *_ = await events(dispatcher, tools)
    assert first.prompt_logprobs == LOGPROBS
    assert dispatcher.load().num_stale_deltas == 2

"""Ready workers of other lengths, or of other weights, as in a rolling change of the model or of its settings."""

import asyncio

import pytest

from common.errors import Unavailable
from common.wire.messages import DecodeRequest, PrefillRequest

PROMPT = list(range(1, 13))


async def streaming(dispatcher, tools, **options):
    """A request that its decode worker has begun to answer, and the task that collects its tokens."""
    request = tools.request(PROMPT, **options)
    task = asyncio.create_task(tools.collect(dispatcher, request))
    await tools.until(lambda: dispatcher.load().stages["decode"])
    return task


def busy(workers):
    """The worker that runs a request now."""
    return next(worker for worker in workers if worker.jobs)


def ready(dispatcher):
    """Addresses of decode workers that may be given work."""
    return [worker.address for worker in dispatcher.fleet.registry.ready("decode")]


# ---------------------------------------------------------------- lengths


async def test_a_request_goes_where_it_fits(cluster, tools):
    short, long = cluster.add("decode", max_model_len=20), cluster.add("decode", max_model_len=100)
    dispatcher = await cluster.start(prefill=0, decode=0)
    for _ in range(3):
        assert (await tools.collect(dispatcher, tools.request(PROMPT, max_tokens=30)))[0] == tools.expected(PROMPT, 30)
    assert (len(short.of(DecodeRequest)), len(long.of(DecodeRequest))) == (0, 3)
    for number in range(4):
        await tools.collect(dispatcher, tools.request([100 + number, *PROMPT[1:]], max_tokens=8))
    assert short.of(DecodeRequest)


async def test_a_kv_cache_is_a_length_too(cluster, tools):
    short, long = cluster.add("decode", num_blocks=5), cluster.add("decode", num_blocks=50)
    dispatcher = await cluster.start(prefill=0, decode=0)
    for _ in range(3):
        await tools.collect(dispatcher, tools.request(PROMPT, max_tokens=30))
    assert (len(short.of(DecodeRequest)), len(long.of(DecodeRequest))) == (0, 3)


@pytest.mark.parametrize("max_model_len", [8, 12, 13])
async def test_a_prompt_is_not_sent_to_a_prefill_worker_that_would_end_it(cluster, tools, max_model_len):
    """One that takes the prompt and a token only ends the answer by its first token."""
    small = cluster.add("prefill", max_model_len=max_model_len)
    dispatcher = await cluster.start(prefill=0)
    assert (await tools.collect(dispatcher, tools.request(PROMPT)))[0] == tools.expected(PROMPT, 8)
    assert not small.of(PrefillRequest)
    assert dispatcher.load().num_choices == {"local": 1}


async def test_one_token_goes_to_a_prefill_worker_that_just_takes_it(cluster, tools):
    small = cluster.add("prefill", max_model_len=13)
    dispatcher = await cluster.start(prefill=0)
    await tools.collect(dispatcher, tools.request(PROMPT, max_tokens=1))
    assert len(small.of(PrefillRequest)) == 1


@pytest.mark.slow
async def test_a_stream_that_fits_nowhere_else_waits_for_one_that_takes_it(cluster, tools):
    """It was begun on a longer worker, and another one would refuse it: as the client's own fault, at that."""
    long, short = cluster.add("decode"), cluster.add("decode", max_model_len=16)
    dispatcher = await cluster.start(prefill=0, decode=0)
    long.token_s = 0.01
    task = await streaming(dispatcher, tools, max_tokens=60)
    (state,) = dispatcher.core.states.values()
    await tools.until(lambda: len(state.stream.token_ids) >= 10)
    long.die()
    await tools.until(lambda: dispatcher.load().stages["queue"])
    await long.restart()
    assert (await task)[0] == tools.expected(PROMPT, 60)
    assert not short.of(DecodeRequest)


async def test_a_request_that_fits_nowhere_says_so(cluster, tools):
    cluster.add("decode", max_model_len=12)
    dispatcher = await cluster.start(prefill=0, decode=0, queue_timeout_s=0.2)
    with pytest.raises(
        Unavailable, match="it has 12 tokens, but ready decode workers accept at most 12, including the next one"
    ):
        await tools.collect(dispatcher, tools.request(PROMPT))


async def test_a_begun_answer_is_rather_cut_than_lost(cluster, tools):
    """The longer worker is gone: the answer, which may end long before, goes on where it has room for the present."""
    long, short = cluster.add("decode"), cluster.add("decode", max_model_len=100)
    dispatcher = await cluster.start(prefill=0, decode=0)
    long.token_s, long.stop_at, short.stop_at = 0.01, 30, 30
    task = await streaming(dispatcher, tools, max_tokens=1000)
    long.die()
    assert (await task)[0] == tools.expected(PROMPT, 30)
    assert short.of(DecodeRequest)


# ---------------------------------------------------------------- weights


@pytest.mark.slow
async def test_a_begun_stream_goes_on_with_the_weights_it_began_with(cluster, tools):
    for weights in ("new", "old", "old", "new"):
        cluster.add("decode", weights=weights, fingerprint=weights)
    dispatcher = await cluster.start(prefill=0, decode=0)
    for worker in cluster.decode:
        worker.token_s = 0.01
    task = await streaming(dispatcher, tools, max_tokens=40)
    first = busy(cluster.decode)
    first.die()
    tokens, last = await task
    assert tokens == tools.expected(PROMPT, 40)
    heir = next(worker for worker in cluster.decode if worker.worker_id == last.timeline.decode_worker)
    assert heir is not first and heir.hello["weights"] == first.hello["weights"]
    assert [len(worker.of(DecodeRequest)) for worker in cluster.decode if worker not in (first, heir)] == [0, 0]


@pytest.mark.slow
async def test_another_layout_of_the_same_weights_will_do(cluster, tools):
    """KV cannot pass between the two; the stream's tokens can."""
    for fingerprint in ("blocks of 16", "blocks of 32"):
        cluster.add("decode", weights="w", fingerprint=fingerprint)
    dispatcher = await cluster.start(prefill=0, decode=0)
    for worker in cluster.decode:
        worker.token_s = 0.01
    task = await streaming(dispatcher, tools, max_tokens=40)
    busy(cluster.decode).die()
    assert (await task)[0] == tools.expected(PROMPT, 40)


@pytest.mark.slow
async def test_a_stream_whose_weights_are_gone_ends_and_says_why(cluster, tools):
    old, new = cluster.add("decode", weights="old"), cluster.add("decode", weights="new")
    dispatcher = await cluster.start(prefill=0, decode=0, queue_timeout_s=0.3)
    old.token_s = 0.01
    new.beat["ready"] = False
    await tools.until(lambda: ready(dispatcher) == [old.address])
    task = await streaming(dispatcher, tools, max_tokens=1000)
    new.beat.clear()
    await tools.until(lambda: len(ready(dispatcher)) == 2)
    old.die()
    with pytest.raises(Unavailable, match="no ready decode worker has the weights with which its answer began"):
        await task
    assert not new.of(DecodeRequest)
    assert (await tools.collect(dispatcher, tools.request(PROMPT)))[0] == tools.expected(PROMPT, 8)


async def test_a_request_that_was_not_begun_goes_anywhere(cluster, tools):
    old, new = cluster.add("decode", weights="old"), cluster.add("decode", weights="new")
    dispatcher = await cluster.start(prefill=0, decode=0)
    for worker in (old, new):
        worker.on_request = lambda router, message: message.attempt == 0
    task = asyncio.create_task(tools.collect(dispatcher, tools.request(PROMPT)))
    await tools.until(lambda: old.of(DecodeRequest) or new.of(DecodeRequest))
    (old if old.of(DecodeRequest) else new).die()
    assert (await task)[0] == tools.expected(PROMPT, 8)


async def test_a_first_token_counts_as_begun(cluster, tools):
    """The prefill worker sent it, and its decode worker is lost before it says anything."""
    cluster.add("prefill", weights="old", fingerprint="old")
    old, new = (cluster.add("decode", weights=name, fingerprint=name) for name in ("old", "new"))
    dispatcher = await cluster.start(prefill=0, decode=0)
    new.beat["ready"] = False
    await tools.until(lambda: ready(dispatcher) == [old.address])
    old.on_request = lambda router, message: message.attempt == 0
    stream = dispatcher.generate(tools.request(PROMPT))
    tokens = list((await anext(stream)).token_ids)
    new.beat.clear()
    await tools.until(lambda: len(ready(dispatcher)) == 2)
    old.die()
    await old.restart()
    tokens += [token async for event in stream for token in event.token_ids]
    assert tokens == tools.expected(PROMPT, 8)
    assert not new.of(DecodeRequest)


async def test_a_draining_worker_keeps_what_no_other_has_the_weights_for(cluster, tools):
    """Its prefill worker has sent the first token already; nothing has come from itself."""
    cluster.add("prefill", weights="old", fingerprint="old")
    old, new = (cluster.add("decode", weights=name, fingerprint=name) for name in ("old", "new"))
    dispatcher = await cluster.start(prefill=0, decode=0)
    new.beat["ready"] = False
    await tools.until(lambda: ready(dispatcher) == [old.address])
    cluster.ship, ship = (lambda *kv: held.append(kv)), cluster.ship
    held = []
    stream = dispatcher.generate(tools.request(PROMPT))
    tokens = list((await anext(stream)).token_ids)
    new.beat.clear()
    old.beat["draining"] = True
    await tools.until(lambda: ready(dispatcher) == [new.address])
    await asyncio.sleep(0.1)  # ticks in which it could be taken away
    ship(*held[0])
    tokens += [token async for event in stream for token in event.token_ids]
    assert tokens == tools.expected(PROMPT, 8)
    assert not new.of(DecodeRequest)


async def test_log_probabilities_of_a_prompt_come_from_one_worker(cluster, tools):
    old, new = (cluster.add("decode", weights=name) for name in ("old", "new"))
    dispatcher = await cluster.start(prefill=0, decode=0)

    def half(worker):
        def begin(router, message):
            if message.attempt:
                return False
            worker.send_logprobs(router, message, [100 + token for token in PROMPT[:7]])
            return True

        return begin

    for worker in (old, new):
        worker.on_request = half(worker)
    stream = dispatcher.generate(tools.request(PROMPT, prompt_logprobs=0))
    task = asyncio.create_task(anext(stream))
    await tools.until(lambda: any(state.stream._prompt_logprobs for state in dispatcher.core.states.values()))
    (old if old.of(DecodeRequest) else new).die()
    event = await task
    assert [-one.logprob for one in event.prompt_logprobs] == PROMPT[1:]
    await stream.aclose()

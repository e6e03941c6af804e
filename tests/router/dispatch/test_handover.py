"""Decode workers that drain: their streams go on elsewhere, every token once, and nothing counts as a failure."""

import asyncio
from functools import partial

import pytest
from msgspec import structs

from common.config import RouterConfig
from common.wire.messages import (
    AbortRequest,
    DecodeRequest,
    HandOver,
    PrefillRequest,
    TokenDelta,
    TokenOutput,
)
from common.wire.sampling_params import SamplingParams
from router.dispatch import handover
from router.dispatch.client import GenerationRequest
from router.dispatch.core import Actions, DispatchCore
from router.fleet.prefix_index import PrefixIndex
from router.fleet.registry import WorkerRegistry
from router.fleet.worker import Worker, WorkerState

from ...fake_worker import heartbeat_of, hello_of

PROMPT = list(range(1, 13))
LONG = 400
"""Tokens of an answer that takes seconds: nobody is through with it before what the test waits for."""


async def start(cluster, decode=2, **options):
    dispatcher = await cluster.start(decode=decode, **options)
    for worker in cluster.decode:
        worker.token_s = 0.01
    return dispatcher


async def streaming(dispatcher, tools, cluster, *, prompt=PROMPT, **options):
    """A request that its decode worker has begun to answer, and the task that collects its tokens."""
    request = tools.request(prompt, **options)
    task = asyncio.create_task(tools.collect(dispatcher, request))
    await tools.until(lambda: request.request_id in dispatcher.core.states and assigned(dispatcher, request).delivered)
    return task, next(w for w in cluster.decode if w.address == assigned(dispatcher, request).address)


def assigned(dispatcher, request):
    decode = dispatcher.core.states[request.request_id].attempts.decode
    return decode if decode is not None else type("Nobody", (), {"delivered": False})


def other_than(cluster, worker):
    return next(other for other in cluster.decode if other is not worker)


def drain(worker):
    worker.beat["draining"] = True


def hurry(cluster):
    """What the test waited for has happened: the rest of the answer need not take long."""
    for worker in cluster.decode:
        worker.token_s = 0.0


async def all_free(dispatcher, tools):
    """No booking is left."""
    await tools.until(lambda: not any(worker.bookings for worker in dispatcher.fleet.registry.workers.values()))


async def test_a_stream_goes_on_at_the_other_worker(cluster, tools):
    dispatcher = await start(cluster)
    task, old = await streaming(dispatcher, tools, cluster, max_tokens=LONG)
    new = other_than(cluster, old)
    drain(old)
    await tools.until(lambda: dispatcher.load().num_handovers)
    old.die()
    hurry(cluster)
    tokens, last = await task
    assert tokens == tools.expected(PROMPT, LONG)
    (order,) = old.of(HandOver)
    (request,) = new.of(DecodeRequest)
    assert (request.attempt, order.attempt, order.new_attempt) == (1, 0, 1)
    assert (request.prefill_worker, order.target.worker_id) == (old.worker_id, new.worker_id)
    assert request.num_output_tokens == order.num_output_tokens > 0
    assert request.num_reserved_tokens == order.num_reserved_tokens == handover.RESERVED_TOKENS
    assert (last.timeline.decode_worker, last.timeline.num_attempts) == (new.worker_id, 1)
    assert last.timeline.decode_s > 0.25  # what the new one says, and the time at the old one
    assert dispatcher.load().num_handovers == {"done": 1}
    assert not dispatcher.load().num_retries and not dispatcher.load().num_failures
    await all_free(dispatcher, tools)


async def test_the_new_workers_word_suffices(cluster, tools):
    """What the old one says of its leaving may be late, or lost."""
    dispatcher = await start(cluster)
    task, old = await streaming(dispatcher, tools, cluster, max_tokens=LONG)
    send = old.send
    old.send = lambda router, message: None if moved(message) else send(router, message)
    drain(old)
    await tools.until(lambda: dispatcher.load().num_handovers)
    hurry(cluster)
    tokens, last = await task
    assert tokens == tools.expected(PROMPT, LONG)
    assert last.timeline.decode_worker != old.worker_id
    await tools.until(lambda: old.of(AbortRequest))  # it may not know that the new one has it
    await all_free(dispatcher, tools)


def moved(message):
    return isinstance(message, TokenOutput) and message.outputs[0].finish_reason == "moved"


async def test_late_tokens_of_the_old_worker_are_ignored(cluster, tools):
    dispatcher = await start(cluster)
    task, old = await streaming(dispatcher, tools, cluster, max_tokens=LONG)
    router, message = next(iter(old.routers)), old.of(DecodeRequest)[0]
    drain(old)
    await tools.until(lambda: dispatcher.load().num_handovers)
    delta = TokenDelta(message.request_id, 0, 1, (12345,))
    old.send_delta(router, delta)
    await tools.until(lambda: dispatcher.load().num_stale_deltas)
    hurry(cluster)
    assert (await task)[0] == tools.expected(PROMPT, LONG)


@pytest.mark.slow
async def test_many_streams_leave_a_few_at_a_time(cluster, tools, monkeypatch):
    monkeypatch.setattr(handover, "MAX_PER_TARGET", 2)
    dispatcher = await start(cluster, prefill=0)
    cluster.decode[1].beat["draining"] = True
    await tools.until(lambda: len(dispatcher.fleet.registry.ready("decode")) == 1)
    old, new = cluster.decode
    prompts = [[n, *PROMPT] for n in range(6)]
    tasks = [(await streaming(dispatcher, tools, cluster, prompt=p, max_tokens=LONG))[0] for p in prompts]
    most = 0

    def count(router, order):
        nonlocal most
        most = max(most, sum(state.attempts.successor is not None for state in dispatcher.core.states.values()))
        return False

    old.on_handover = count
    new.beat["draining"] = False
    await tools.until(lambda: len(dispatcher.fleet.registry.ready("decode")) == 2)
    drain(old)
    await tools.until(lambda: dispatcher.load().num_handovers.get("done") == 6)
    hurry(cluster)
    for p, task in zip(prompts, tasks, strict=True):
        assert (await task)[0] == tools.expected(p, LONG)
    assert most == 2


async def test_what_has_not_begun_is_placed_anew_at_once(cluster, tools):
    dispatcher = await start(cluster)
    cluster.ship = lambda *kv: None  # its KV never comes
    task = asyncio.create_task(tools.collect(dispatcher, tools.request(PROMPT)))
    await tools.until(lambda: dispatcher.load().stages["transfer"])
    old = next(worker for worker in cluster.decode if worker.of(DecodeRequest))
    cluster.ship = type(cluster).ship.__get__(cluster)
    drain(old)
    tokens, last = await task
    assert tokens == tools.expected(PROMPT, 8)
    assert last.timeline.num_attempts == 1 and last.timeline.decode_worker != old.worker_id
    assert not old.of(HandOver) and old.of(AbortRequest)
    assert not dispatcher.load().num_retries
    await all_free(dispatcher, tools)


@pytest.mark.slow
async def test_with_nobody_else_the_stream_goes_on_where_it_is(cluster, tools):
    dispatcher = await start(cluster, decode=1)
    task, old = await streaming(dispatcher, tools, cluster, max_tokens=60)
    drain(old)
    assert (await task)[0] == tools.expected(PROMPT, 60)
    assert not old.of(HandOver)


async def test_a_worker_that_joins_late_takes_the_stream(cluster, tools):
    dispatcher = await start(cluster)
    task, old = await streaming(dispatcher, tools, cluster, max_tokens=LONG)
    new = other_than(cluster, old)
    new.die()
    await tools.until(lambda: len(dispatcher.fleet.registry.ready("decode")) == 1)
    drain(old)
    await tools.until(lambda: not dispatcher.fleet.registry.ready("decode"))
    await new.restart()
    await tools.until(lambda: dispatcher.load().num_handovers)
    hurry(cluster)
    tokens, last = await task
    assert tokens == tools.expected(PROMPT, LONG)
    assert last.timeline.decode_worker == new.worker_id


# ---------------------------------------------------------------- what goes wrong


async def test_a_refused_hand_over_is_tried_again(cluster, tools, monkeypatch):
    monkeypatch.setattr(handover, "RETRY_HANDOVER_S", 0.05)
    dispatcher = await start(cluster)
    task, old = await streaming(dispatcher, tools, cluster, max_tokens=LONG)
    refusals = iter([True, True])
    old.on_handover = lambda router, order: next(refusals, False) and old.fail(router, order)
    drain(old)
    await tools.until(lambda: dispatcher.load().num_handovers.get("done"))
    hurry(cluster)
    tokens, last = await task
    assert tokens == tools.expected(PROMPT, LONG)
    assert dispatcher.load().num_handovers == {"failed": 2, "done": 1}
    assert [order.new_attempt for order in old.of(HandOver)] == [1, 2, 3]
    assert last.timeline.num_attempts == 1
    assert len(other_than(cluster, old).of(AbortRequest)) == 2
    await all_free(dispatcher, tools)


async def test_a_strangers_word_does_not_end_a_hand_over(cluster, tools):
    dispatcher = await start(cluster)
    task, old = await streaming(dispatcher, tools, cluster, max_tokens=LONG)
    stranger, (router,) = cluster.prefill[0], cluster.prefill[0].routers
    old.on_handover = lambda router, order: True
    drain(old)
    await tools.until(lambda: old.of(HandOver))
    stranger.fail(router, old.of(HandOver)[0])
    later = stranger.step + 3
    await tools.until(lambda: stranger.step > later)
    assert not dispatcher.load().num_handovers
    hurry(cluster)
    assert (await task)[0] == tools.expected(PROMPT, LONG)


@pytest.mark.parametrize(
    "how", ["fails", pytest.param("dies", marks=pytest.mark.slow), pytest.param("drains", marks=pytest.mark.slow)]
)
async def test_a_target_that_does_not_make_it(cluster, tools, how):
    dispatcher = await start(cluster)
    task, old = await streaming(dispatcher, tools, cluster, max_tokens=150)
    new = other_than(cluster, old)
    old.on_handover = lambda router, order: True  # it copies, and copies
    if how == "fails":
        new.on_request = new.fail
    drain(old)
    await tools.until(lambda: old.of(HandOver))
    if how == "dies":
        new.die()
    if how == "drains":
        drain(new)
    tokens, last = await task
    assert tokens == tools.expected(PROMPT, 150)
    assert last.timeline.decode_worker == old.worker_id
    assert not dispatcher.load().num_retries
    await all_free(dispatcher, tools)


@pytest.mark.parametrize("received", [False, True], ids=["copying", "received"])
async def test_the_old_worker_dies_meanwhile(cluster, tools, received):
    dispatcher = await start(cluster)
    task, old = await streaming(dispatcher, tools, cluster, max_tokens=LONG)
    new = other_than(cluster, old)
    new.token_s = 0.001
    if received:
        send = old.send
        old.send = lambda router, message: None if moved(message) else send(router, message)
    else:
        old.on_handover = lambda router, order: True
    drain(old)
    await tools.until(lambda: old.of(HandOver))
    old.die()
    tokens, last = await task
    assert tokens == tools.expected(PROMPT, LONG)
    assert last.timeline.decode_worker == new.worker_id
    await all_free(dispatcher, tools)


@pytest.mark.slow
async def test_a_stream_whose_target_failed_after_it_had_moved(cluster, tools):
    """Of the target's failure the router concludes that the old worker goes on; but that one is through with it."""
    dispatcher = await start(cluster, decode=3)
    task, old = await streaming(dispatcher, tools, cluster, max_tokens=150)
    targets = [worker for worker in cluster.decode if worker is not old]

    def record_failure(router, order):
        target = next(worker for worker in targets if worker.worker_id == order.target.worker_id)
        job = old.jobs.pop(order.request_id)
        target.fail(router, structs.replace(job.request, attempt=order.new_attempt))
        asyncio.get_running_loop().call_later(0.1, lambda: old.output(router, job.request, job.index, [], "moved"))
        return True

    for target in targets:
        target.on_request = lambda router, message: message.num_reserved_tokens > 0
    old.on_handover = record_failure
    drain(old)
    tokens, last = await task
    assert tokens == tools.expected(PROMPT, 150)
    assert last.timeline.decode_worker != old.worker_id and last.timeline.num_attempts > 1
    await all_free(dispatcher, tools)


async def test_an_answer_that_ends_meanwhile(cluster, tools):
    dispatcher = await start(cluster)
    task, old = await streaming(dispatcher, tools, cluster, max_tokens=LONG)
    old.on_handover = lambda router, order: True
    drain(old)
    await tools.until(lambda: old.of(HandOver))
    hurry(cluster)
    assert (await task)[0] == tools.expected(PROMPT, LONG)
    await tools.until(lambda: other_than(cluster, old).of(AbortRequest))
    await tools.until(lambda: dispatcher.load().num_handovers == {"ended": 1})
    await all_free(dispatcher, tools)


async def test_a_client_that_goes_away_meanwhile(cluster, tools):
    dispatcher = await start(cluster)
    task, old = await streaming(dispatcher, tools, cluster, max_tokens=LONG)
    old.on_handover = lambda router, order: True
    drain(old)
    await tools.until(lambda: old.of(HandOver))
    task.cancel()
    for worker in cluster.decode:
        await tools.until(lambda worker=worker: worker.of(AbortRequest))
    await all_free(dispatcher, tools)


async def test_what_was_acknowledged_is_known_to_be_cached_before_the_new_worker_speaks(cluster, tools):
    prompt = list(range(1, 101))
    dispatcher = await start(cluster, prefill=1, local_prefill_threshold=8)
    task, old = await streaming(dispatcher, tools, cluster, prompt=prompt, max_tokens=300)
    new = other_than(cluster, old)
    send = new.send
    new.send = lambda router, message: None if isinstance(message, TokenOutput) else send(router, message)
    drain(old)
    await tools.until(lambda: dispatcher.load().num_handovers == {"done": 1})
    task.cancel()
    await tools.until(lambda: new.of(AbortRequest))
    new.send = send
    assert (await tools.collect(dispatcher, tools.request(prompt)))[0] == tools.expected(prompt, 8)
    handed_over, again = new.of(DecodeRequest)
    assert (handed_over.prefill_worker, again.prefill_worker) == (old.worker_id, "")
    await all_free(dispatcher, tools)


@pytest.mark.slow
async def test_a_hand_over_of_which_nothing_is_heard(cluster, tools, monkeypatch):
    monkeypatch.setattr(handover, "TIMEOUT_S", 0.1)
    dispatcher = await start(cluster)
    task, old = await streaming(dispatcher, tools, cluster, max_tokens=LONG)
    old.on_handover = lambda router, order: len(old.of(HandOver)) == 1
    drain(old)
    await tools.until(lambda: dispatcher.load().num_handovers.get("done"))
    hurry(cluster)
    assert (await task)[0] == tools.expected(PROMPT, LONG)
    assert dispatcher.load().num_handovers == {"failed": 1, "done": 1}
    await all_free(dispatcher, tools)


# ---------------------------------------------------------------- the choice of a target


def worker(name, *, beat=None, **hello):
    about, load = hello_of(name, **hello), heartbeat_of(name, **(beat or {}))
    made = Worker(name, "decode", WorkerState.READY, hello=about)
    made.load.report(load, 0.0)
    return made


@pytest.mark.parametrize(
    "target",
    [
        worker("b", fingerprint="other"),
        worker("b", beat={"num_free_blocks": 9}),
        worker("b", max_num_seqs=1, beat={"num_running": 1}),
        worker("b", max_model_len=39),
    ],
    ids=["another layout", "no blocks", "no place in the batch", "too short"],
)
def test_a_worker_without_room_gets_no_stream(target):
    assert handover.choose_target([target], worker("a"), num_tokens=40, busy={}) is None
    assert handover.choose_target([target, worker("c")], worker("a"), num_tokens=40, busy={}).address == "c"


def test_the_emptiest_worker_gets_the_stream():
    crowded, empty = worker("b", beat={"num_running": 3}), worker("c")
    choose = partial(handover.choose_target, [crowded, empty], worker("a"), num_tokens=40)
    assert choose(busy={}) is empty
    assert choose(busy={"c": 4}) is crowded
    assert choose(busy={"b": handover.MAX_PER_TARGET, "c": handover.MAX_PER_TARGET}) is None


def test_while_no_worker_has_room_each_message_costs_one_search(monkeypatch):
    addresses, orders = ["d0", "d1", "d2"], []
    registry = WorkerRegistry([], addresses, worker_timeout_s=60.0)
    actions = Actions(
        lambda _, message: orders.append(message) or True, lambda *_: None, lambda *_: lambda: None, lambda _: None
    )
    core = DispatchCore(RouterConfig(model="m"), registry, PrefixIndex(), actions)
    beat = partial(heartbeat_of, num_free_blocks=1000)
    for address in addresses:
        registry.on_hello(address, hello_of(address, num_blocks=1000, max_model_len=4000), 0.0)
        registry.on_heartbeat(address, beat(address, draining=address != "d0"), 0.0)
    states = [
        core.submit(GenerationRequest(f"r{i}", [i] * (900 - 50 * i), SamplingParams(max_tokens=500)), 0.0)
        for i in range(12)
    ]
    searches = []
    choose = handover.choose_target
    monkeypatch.setattr(
        handover, "choose_target", lambda *args, **sizes: searches.append(sizes["num_tokens"]) or choose(*args, **sizes)
    )

    def next_tokens(index):
        searches.clear()
        deltas = tuple(TokenDelta(state.request.request_id, 0, index, (7,)) for state in states)
        core.on_output("d0", TokenOutput(worker_id="d0", epoch=1, outputs=deltas), 0.1)
        return [order.request_id for order in orders if isinstance(order, HandOver)]

    next_tokens(0)
    registry.on_heartbeat("d0", beat("d0", num_running=12, draining=True), 0.1)
    for address, num_free in (("d1", 8), ("d2", 20)):
        registry.on_heartbeat(address, beat(address, num_free_blocks=num_free), 0.1)
    assert next_tokens(1) == [] and len(searches) == 1, "the longer ones need no search"
    registry.on_heartbeat("d1", beat("d1", num_free_blocks=128), 0.1)
    assert next_tokens(2) == ["r11"] and len(searches) == 2


async def test_a_prefill_worker_that_dies_in_the_middle_disturbs_nothing(cluster, tools):
    """The stream is at the new worker, which has not said anything yet: nothing of it is to be prefilled again."""
    dispatcher = await start(cluster, prefill=2)
    task, old = await streaming(dispatcher, tools, cluster, max_tokens=LONG)
    new = other_than(cluster, old)
    send, held = new.send, []
    new.send = lambda router, message: (held.append if isinstance(message, TokenOutput) else partial(send, router))(
        message
    )
    drain(old)
    await tools.until(lambda: dispatcher.load().num_handovers and held)
    (router,) = new.routers
    victim = next(worker for worker in cluster.prefill if worker.of(PrefillRequest))
    victim.die()
    await tools.until(lambda: len(dispatcher.fleet.registry.ready("prefill")) == 1)
    await tools.until(lambda: not dispatcher.fleet.registry.workers[victim.address].hello)
    new.send = send
    for message in held:
        send(router, message)
    hurry(cluster)
    assert (await task)[0] == tools.expected(PROMPT, LONG)
    assert len(new.of(DecodeRequest)) == 1
    assert not dispatcher.load().num_retries

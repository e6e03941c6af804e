"""Answers move between ready decode workers as balance says, over real sockets."""

from __future__ import annotations

import asyncio

import pytest

from common.config import RouterConfig
from common.latency.step_model import StepModel
from common.wire.messages import HandOver
from common.wire.sampling_params import SamplingParams
from router.dispatch import balancer, handover
from router.dispatch.client import GenerationRequest
from router.dispatch.core import Actions, DispatchCore
from router.fleet.prefix_index import PrefixIndex
from router.fleet.registry import WorkerRegistry

from ...fake_worker import heartbeat_of, hello_of

MODEL = StepModel(fixed_s=0.01, row_s=1e-3, context_s=1e-7, num_steps=500)
PROMPT = list(range(1, 13))
LONG = 600


async def crowd(cluster, tools, **options):
    """A dispatcher, and one answer on a worker that says it has nearly no blocks left."""
    dispatcher = await cluster.start(decode=2, **options)
    for worker in cluster.decode:
        worker.token_s = 0.02
    request = tools.request(PROMPT, max_tokens=LONG)
    task = asyncio.create_task(tools.collect(dispatcher, request))
    await tools.until(lambda: state_of(dispatcher, request) is not None and state_of(dispatcher, request).delivered)
    full = next(one for one in cluster.decode if one.address == state_of(dispatcher, request).address)
    full.beat |= {"step_model": MODEL, "num_running": 1, "num_free_blocks": 1, "num_cached_blocks": 0}
    return dispatcher, task, full


def state_of(dispatcher, request):
    state = dispatcher.core.states.get(request.request_id)
    return state.attempts.decode if state is not None else None


def hurry(cluster):
    for worker in cluster.decode:
        worker.token_s = 0.0


async def test_an_answer_moves_off_a_worker_that_runs_full(cluster, tools):
    dispatcher, task, full = await crowd(cluster, tools)
    await tools.until(lambda: dispatcher.load().num_handovers.get("done"))
    hurry(cluster)
    assert (await task)[0] == tools.expected(PROMPT, LONG)
    load = dispatcher.load()
    assert load.num_balanced == {"blocks": 1} and not load.num_retries and not load.num_failures
    assert len(full.of(HandOver)) == 1
    await tools.until(lambda: not any(worker.bookings for worker in dispatcher.fleet.registry.workers.values()))


@pytest.mark.slow
async def test_a_move_that_fails_is_tried_again_and_costs_no_token(cluster, tools, monkeypatch):
    monkeypatch.setattr(balancer, "PAUSE_S", 0.05)
    monkeypatch.setattr(handover, "RETRY_HANDOVER_S", 0.05)
    dispatcher, task, full = await crowd(cluster, tools)
    refusals = iter([True, True])
    full.on_handover = lambda router, order: next(refusals, False) and full.fail(router, order)
    await tools.until(lambda: dispatcher.load().num_handovers.get("done"))
    hurry(cluster)
    assert (await task)[0] == tools.expected(PROMPT, LONG)
    load = dispatcher.load()
    assert load.num_handovers == {"failed": 2, "done": 1} and load.num_balanced == {"blocks": 3}
    assert not load.num_retries and not load.num_failures


async def test_after_a_move_that_failed_the_next_one_waits_longer(cluster, tools, monkeypatch):
    monkeypatch.setattr(balancer, "PAUSE_S", 30.0)
    dispatcher, task, full = await crowd(cluster, tools)
    full.on_handover = lambda router, order: full.fail(router, order) or True
    await tools.until(lambda: dispatcher.load().num_handovers.get("failed"))
    later = full.step + 5
    await tools.until(lambda: full.step > later)
    assert dispatcher.load().num_balanced == {"blocks": 1}
    hurry(cluster)
    assert (await task)[0] == tools.expected(PROMPT, LONG)


def test_moves_that_always_fail_keep_the_longest_pause():
    addresses = ("tcp://d:1", "tcp://e:1")
    registry = WorkerRegistry([], addresses, worker_timeout_s=1.0)
    actions = Actions(lambda *_: True, lambda *_: None, lambda *_: lambda: None, lambda _: None)
    core = DispatchCore(RouterConfig(decode=addresses), registry, PrefixIndex(), actions)
    for address in addresses:
        registry.on_hello(address, hello_of(address), 0.0)
        registry.on_heartbeat(address, heartbeat_of(address), 0.0)
    state = core.submit(GenerationRequest("a", [1, 2, 3], SamplingParams(max_tokens=100)), 0.0)
    source, target = sorted(registry.workers.values(), key=lambda one: one.address != state.attempts.decode.address)
    for _ in range(2000):
        core._balancer._begin(state, source, target, "blocks", 0.0)
        core._handovers.fail(state, "the worker refused", 0.0)
        core._balancer.tick(core.states, 0.0)
    assert core._balancer._rests_until[source.address] == balancer.MAX_PAUSE_S


@pytest.mark.slow
async def test_no_answer_moves_where_the_operator_forbids_it(cluster, tools):
    dispatcher, task, _ = await crowd(cluster, tools, balance_decode=False)
    await asyncio.sleep(1.0)
    hurry(cluster)
    assert (await task)[0] == tools.expected(PROMPT, LONG)
    assert not dispatcher.load().num_balanced

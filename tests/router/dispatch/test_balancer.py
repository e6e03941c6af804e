"""Answers move between ready decode workers as balance says, over real sockets."""

from __future__ import annotations

import asyncio

import pytest

from common.latency.step_model import StepModel
from common.wire.messages import HandOver
from router.dispatch import balancer, handover

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


@pytest.mark.slow
async def test_no_answer_moves_where_the_operator_forbids_it(cluster, tools):
    dispatcher, task, _ = await crowd(cluster, tools, balance_decode=False)
    await asyncio.sleep(1.0)
    hurry(cluster)
    assert (await task)[0] == tools.expected(PROMPT, LONG)
    assert not dispatcher.load().num_balanced

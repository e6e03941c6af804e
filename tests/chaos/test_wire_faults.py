"""Messages that are lost, late, doubled, out of order, cut short or spoilt, one kind after the other, on real wires.

Whatever happens to one message, every answer is the undisturbed one and no request holds a block afterwards.
"""

from __future__ import annotations

import asyncio
import time
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest

from benchmarks.stack import StackProcess
from common.wire.messages import (
    AbortRequest,
    AnyMessage,
    BlockEvents,
    BlockSnapshot,
    BlockSnapshotRequest,
    ChangeRole,
    DecodeRequest,
    HandOver,
    KVAck,
    KVBlocks,
    KVDone,
    KVFailed,
    KVGrant,
    KVOpen,
    KVPull,
    KVTaken,
    KVWait,
    Message,
    PooledOutput,
    PromptLogprobs,
    RequestFailed,
    ResetPrefixCache,
    RouterHeartbeat,
    RouterHello,
    SetAdapter,
    SetServing,
    TokenOutput,
    WeightsPart,
    WeightsRequest,
    WorkerHeartbeat,
    WorkerHello,
)
from router.fleet.prefix_index import ASK_AGAIN_S

from .rig import DECODE_FLAGS, PREFILL_FLAGS, ROUTER_FLAGS, WORKER_FLAGS, Rig, long_asks, of_length, some_asks
from .streams import Ask
from .watch import counter, is_ready, until
from .wire_proxy import FRAME_FAULTS, Fault, WireProxy

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

LATE_S = 3.0
"""Longer than lease and transfer timeout: what it was for has been given up by then."""
MAX_TURNS = 8


@pytest.fixture(scope="module", params=["tcp", "shm"])
def shared_rig(request: pytest.FixtureRequest, stacks: Any) -> Iterator[Rig]:
    with WireProxy() as proxy:
        stack = stacks(
            1,
            2,
            worker_flags=(*WORKER_FLAGS, "--kv-transport", request.param),
            prefill_flags=PREFILL_FLAGS,
            decode_flags=DECODE_FLAGS,
            router_flags=ROUTER_FLAGS,
            via=proxy.control,
        )
        yield Rig(stack, proxy)
        stack.stop()


@pytest.fixture
async def rig(shared_rig: Rig) -> AsyncIterator[Rig]:
    await shared_rig.expected("some", some_asks())
    yield shared_rig
    await shared_rig.quiet()


only_tcp = pytest.mark.parametrize("shared_rig", ["tcp"], indirect=True)


# ---------------------------------------------------------------- named


@pytest.mark.slow
@only_tcp
async def test_lost_ack(rig: Rig) -> None:
    """The decode worker has everything: the answer goes on, and the prefill worker's lease ends its hold."""
    rule = rig.strike(KVAck, Fault.DROP, times=3)
    await rig.same_answers("lost ack")
    await rig.struck_times(rule, 3)  # an acknowledgement is on no answer's way


@pytest.mark.slow
@only_tcp
async def test_lost_grant(rig: Rig) -> None:
    rule = rig.strike(KVGrant, Fault.DROP)
    await rig.same_answers("lost grant")
    assert rule.struck


@pytest.mark.slow
@only_tcp
async def test_late_frames_after_their_blocks_went_to_another_request(rig: Rig) -> None:
    """Blocks are sent again and again to a pool that is nearly full of others by then."""
    crowd = long_asks(4)
    await rig.expected("crowd", crowd)
    before = await counter(rig.stack.workers("decode"), "diptych_frames_dropped")
    rule = rig.strike(KVBlocks, Fault.DELAY, times=2, delay_s=LATE_S)
    late = asyncio.create_task(rig.same_answers("late frames"))
    await rig.struck(rule)
    for turn in range(3):
        await rig.same_answers(f"reuse {turn}", name="crowd", asks=crowd)
    await late

    async def recognised() -> bool:
        return await counter(rig.stack.workers("decode"), "diptych_frames_dropped") > before

    await until(recognised, "the late frames came, and were dropped")


@only_tcp
async def test_duplicate_done(rig: Rig) -> None:
    rule = rig.strike(KVDone, Fault.DUPLICATE, times=3)
    for turn in range(9):  # a worker that got no core for a second takes part in fewer
        await rig.same_answers(f"duplicate done {turn}")
        if rule.struck == 3:
            break
    assert rule.struck == 3


@pytest.mark.slow
@only_tcp
async def test_a_restarted_peer_on_the_same_address(rig: Rig) -> None:
    """An announcement to a worker's earlier life reaches the later one, which knows that it is not meant.

    Every decode worker is a victim: which of them gets the requests is the router's choice.
    """
    victims = rig.stack.workers("decode")
    own = [victim.addresses["kv_address"] for victim in victims]
    refusals: list[str] = []

    def note(message: Message) -> bool:
        refusals.append(getattr(message, "reason", ""))
        return False

    rig.strike(KVFailed, Fault.DROP, where=note)
    rule = rig.strike(KVOpen, Fault.DELAY, times=len(some_asks()), delay_s=1.0)
    asking = asyncio.create_task(rig.same_answers("restarted"))
    await rig.struck(rule)
    for victim in victims:
        await asyncio.to_thread(victim.kill)
    for victim in victims:
        await asyncio.to_thread(rig.stack.restart, victim)
    assert [victim.addresses["kv_address"] for victim in victims] == own
    for victim in victims:
        await until(lambda victim=victim: is_ready(victim), "the worker is back")
    await asking

    async def refused() -> bool:
        return any("boot epoch" in reason for reason in refusals)

    await until(refused, "the later life refused what was meant for the earlier one")
    rig.proxy.clear()
    await rig.same_answers("after the restart")


@only_tcp
@pytest.mark.parametrize(
    "kind", [DecodeRequest, TokenOutput, PromptLogprobs, RouterHello, WorkerHello, RouterHeartbeat, WorkerHeartbeat]
)
async def test_lost(rig: Rig, kind: type[Message]) -> None:
    await suffer(rig, kind, Fault.DROP)


@only_tcp
async def test_lost_abort(rig: Rig) -> None:
    """The router listens no more and the worker does not know: the request ends by itself, and nothing stays behind."""
    await suffer(rig, AbortRequest, Fault.DROP)


@pytest.mark.slow
@only_tcp
@pytest.mark.parametrize("fault", FRAME_FAULTS)
async def test_spoilt_block(rig: Rig, fault: Fault) -> None:
    """Wrong KV never becomes part of an answer."""
    await suffer(rig, KVBlocks, fault)


# ---------------------------------------------------------------- all


async def plainly(rig: Rig, salt: str) -> None:
    await rig.same_answers(salt)


async def left_alone(rig: Rig, salt: str) -> None:
    """Beside the usual streams one whose client goes away."""
    leaving = Ask({**some_asks()[0].body, "max_tokens": 1500}, leaves_after=3)
    (heard, *_), _ = await asyncio.gather(rig.ask([leaving], salt), rig.same_answers(salt))
    assert heard.left


async def crowded(rig: Rig, salt: str) -> None:
    """More than the decode workers have room for: some must wait, for as long as others take."""
    asks = [*of_length(6, prompt_len=(1300, 1400), num_tokens=600), *long_asks(4)]
    await rig.same_answers(salt, name="waiting", asks=asks)


async def handing_over(rig: Rig, salt: str) -> None:
    """SIGTERM reaches a decode worker that generates: the router must hand over the streams that it placed there."""
    asks = of_length(4, prompt_len=(70, 140), num_tokens=350)
    await rig.expected("handed over", asks)
    asking = asyncio.create_task(rig.same_answers(salt, name="handed over", asks=asks))
    victim = await running_one(rig.stack.workers("decode"))
    victim.terminate()
    await asyncio.to_thread(victim.wait, time.monotonic() + 90)
    await asking
    assert not victim.forced
    await asyncio.to_thread(rig.stack.restart, victim)
    await until(lambda: is_ready(victim), "the worker is back")


async def running_one(workers: Sequence[StackProcess]) -> StackProcess:
    """The first worker that runs streams, once there is one; the outcome does not depend on how far they are."""
    found: list[StackProcess] = []

    async def runs_some() -> bool:
        for worker in workers:
            if await counter([worker], "vllm:num_requests_running") > 0:
                found.append(worker)
                return True
        return False

    await until(runs_some, "streams are under way")
    return found[0]


async def failing(rig: Rig, salt: str) -> None:
    """A transfer fails, because the decode worker refuses what it got."""
    rig.strike(KVBlocks, Fault.TRUNCATE)
    rig.strike(KVDone, Fault.DROP)
    await rig.same_answers(salt)


async def reconnecting(rig: Rig, salt: str) -> None:
    rig.proxy.cut(rig.stack.workers("decode")[0])
    rig.proxy.cut(rig.stack.workers("prefill")[0])
    await rig.same_answers(salt)


async def scoring(rig: Rig, salt: str) -> None:
    """Prompts whose log-probabilities are wanted."""
    asks = [Ask({**ask.body, "logprobs": 1, "echo": True}) for ask in some_asks()]
    await rig.same_answers(salt, name="with-logprobs", asks=asks)


async def forgetting(rig: Rig, salt: str) -> None:
    async with httpx.AsyncClient(base_url=rig.stack.url, trust_env=False, timeout=30) as http:
        await http.post("/reset_prefix_cache")
    await rig.same_answers(salt)


async def missing_events(rig: Rig, salt: str) -> None:
    """The router misses what changed in a cache, and asks for all of it.

    A snapshot that is under way for another reason, a worker that was greeted anew for one, makes up for the events
    that were lost: then it must happen again.
    """
    before = rig.proxy.num_passed[BlockSnapshotRequest.__name__]
    for turn in range(MAX_TURNS):
        rule = rig.strike(BlockEvents, Fault.DROP)
        await rig.same_answers(f"{salt} {turn}")
        await rig.struck(rule)
        if rig.proxy.num_passed[BlockSnapshotRequest.__name__] > before:
            return
        await asyncio.sleep(ASK_AGAIN_S)


SCENARIOS: dict[str, Callable[[Rig, str], Awaitable[None]]] = {
    RouterHello.__name__: reconnecting,
    WorkerHello.__name__: reconnecting,
    AbortRequest.__name__: left_alone,
    HandOver.__name__: handing_over,
    ResetPrefixCache.__name__: forgetting,
    PromptLogprobs.__name__: scoring,
    RequestFailed.__name__: failing,
    KVFailed.__name__: failing,
    KVWait.__name__: crowded,
    BlockSnapshotRequest.__name__: missing_events,
    BlockSnapshot.__name__: missing_events,
}
HEARTBEATS = (RouterHeartbeat, WorkerHeartbeat)
# The roles of these workers are pinned, so no router orders another: tests/e2e/test_role_change.py repeats such orders.
# They generate text: tests/router/dispatch/test_pooled_prompts.py loses and repeats vectors.
# They compute prompts faster than they could pull them, and have no places for adapters: test_pull_faults.py and
# test_adapter_faults.py have workers that do and have. Their caches can be mapped, so they have no ring:
# tests/common/engine/transfer/test_sender_ring.py loses and forges what gives its places back.
# Their weights stay: tests/common/engine/worker/test_received_weights.py loses and repeats parts of others.
APART = {ChangeRole, PooledOutput, KVPull, KVTaken, SetAdapter, SetServing, WeightsPart, WeightsRequest}
KINDS = sorted(set(typing.get_args(AnyMessage)) - APART, key=lambda kind: kind.__name__)


async def suffer(rig: Rig, kind: type[Message], fault: Fault, seed: int = 0) -> None:
    """Do `fault` to a message of `kind` while it matters."""
    rule = rig.strike(kind, fault, times=5 if kind in HEARTBEATS else 1, seed=seed)
    await SCENARIOS.get(kind.__name__, plainly)(rig, f"{kind.__name__} {fault} {seed}")
    await rig.struck(rule)


THROUGH_MEMORY = {KVOpen, KVGrant, KVBlocks, KVDone, KVAck, KVFailed}
"""Kinds that differ when blocks pass through shared memory. Half of their faults strike there, the others over TCP."""
FAULTS = [fault for fault in Fault if fault not in FRAME_FAULTS]
CASES = [
    pytest.param("shm" if kind in THROUGH_MEMORY and (i + j) % 2 else "tcp", kind, fault, id=f"{kind.__name__}-{fault}")
    for i, kind in enumerate(KINDS)
    for j, fault in enumerate(FAULTS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("shared_rig", "kind", "fault"), CASES, indirect=["shared_rig"])
async def test_every_fault_on_every_kind_of_message(rig: Rig, kind: type[Message], fault: Fault) -> None:
    await suffer(rig, kind, fault)

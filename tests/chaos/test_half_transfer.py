"""Prefill workers killed in the middle of a KV transfer: what has arrived is neither shipped nor computed again.

router ──> prefill workers          decode worker <── proxy <── the router's messages, and all KV

The proxy lets some messages of blocks through, spoils those behind them and swallows the end. Messages arrive in order,
so once the decode worker has dropped a spoilt one, it is known what has arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.stack import Stack, StackProcess
from common.wire.messages import KVBlocks, KVDone, KVGrant, KVOpen, Message

from .rig import Rig
from .streams import Ask, difference
from .watch import counter, fetch, is_ready, until
from .wire_proxy import Fault, Rule, WireProxy

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLOCK_SIZE = 16
CHUNK_BLOCKS = 2
"""Blocks that a prefill worker computes at a time: what a message of blocks carries at least."""
PROMPT_BLOCKS = 200
"""Many chunks: when the grant comes, most of them are still to be computed."""
ALWAYS = 1_000_000
PROMPT = [(7 * index * index + index // 3) % 256 for index in range(PROMPT_BLOCKS * BLOCK_SIZE + 5)]
ASKS = [
    Ask({"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 5, "logprobs": 2}),
]


@dataclass
class Attempt:
    """Messages of one attempt on the KV wire. `received`: blocks of messages that got through.

    `num_messages` of blocks were sent, the first spoilt one of them as the `first_spoilt`-th of the tape.
    """

    prefill_worker: str = ""
    granted_from: int = -1
    received: set[int] = field(default_factory=set)
    num_messages: int = 0
    first_spoilt: int = 0


class Tape:
    """Watches the KV wire through a proxy. Of an attempt in `whole`, only so many messages of blocks get through."""

    def __init__(self, proxy: WireProxy, whole: dict[int, int]) -> None:
        self.attempts: dict[int, Attempt] = {}
        self.num_spoilt = 0
        self._whole = whole
        for kind in (KVOpen, KVGrant):
            proxy.inject(Rule(kind, Fault.DROP, where=self._note))
        proxy.inject(Rule(KVBlocks, Fault.FLIP, times=ALWAYS, where=self._spoils))
        proxy.inject(Rule(KVDone, Fault.DROP, times=ALWAYS, where=lambda done: done.attempt in whole))  # type: ignore[attr-defined]

    def _of(self, number: int) -> Attempt:
        return self.attempts.setdefault(number, Attempt())

    def _note(self, message: Message) -> bool:
        if isinstance(message, KVOpen):
            self._of(message.attempt).prefill_worker = message.worker_id
        elif isinstance(message, KVGrant):
            self._of(message.attempt).granted_from = message.first_block
        return False

    def _spoils(self, message: Message) -> bool:
        assert isinstance(message, KVBlocks)
        attempt = self._of(message.attempt)
        attempt.num_messages += 1
        if attempt.num_messages <= self._whole.get(message.attempt, ALWAYS):
            attempt.received |= set(range(message.first_block, message.first_block + len(message.checksums)))
            return False
        self.num_spoilt += 1
        attempt.first_spoilt = attempt.first_spoilt or self.num_spoilt
        return True


@pytest.fixture(scope="module", params=["tcp", "shm"])
def shared_rig(request: pytest.FixtureRequest, stacks: Any) -> Iterator[Rig]:
    with WireProxy() as proxy:

        def via(worker: StackProcess) -> str:
            return proxy.control(worker) if worker.role == "decode" else worker.addresses["address"]

        stack = stacks(
            2,
            1,
            worker_flags=("--kv-transport", request.param, "--heartbeat-s", "0.1"),
            prefill_flags=("--max-num-batched-tokens", str(CHUNK_BLOCKS * BLOCK_SIZE)),
            router_flags=("--local-prefill-threshold", "0"),
            via=via,
        )
        yield Rig(stack, proxy)
        stack.stop()


@pytest.fixture
async def rig(shared_rig: Rig) -> AsyncIterator[Rig]:
    yield shared_rig
    for worker in shared_rig.stack.workers("prefill"):
        if not worker.alive:
            await asyncio.to_thread(shared_rig.stack.restart, worker)
        await until(lambda worker=worker: is_ready(worker), f"{worker.name} is back")
    await until(lambda: all_used(shared_rig.stack), "the router uses every worker")
    await shared_rig.quiet()


async def all_used(stack: Stack) -> bool:
    workers = (await fetch(stack.router, "/load")).json()["workers"]
    return all(worker["state"] == "ready" for worker in workers)


class Killer:
    """Kills prefill workers once blocks of theirs have arrived and others are known to be missing."""

    def __init__(self, rig: Rig, tape: Tape, num_dropped: float) -> None:
        """`num_dropped`: frames that the decode worker had dropped before the tape began."""
        self._rig, self._tape, self._num_dropped = rig, tape, num_dropped

    async def strike(self, number: int) -> Attempt:
        """Kill the one that works on this attempt: what came of it."""
        await until(lambda: self._some_are_missing(number), f"the transfer of attempt {number} is under way")
        attempt = self._tape.attempts[number]
        workers = self._rig.stack.workers("prefill")
        (victim,) = (worker for worker in workers if worker.name == attempt.prefill_worker)
        await asyncio.to_thread(victim.kill)
        return attempt

    async def _some_are_missing(self, number: int) -> bool:
        attempt = self._tape.attempts.get(number)
        if attempt is None or not attempt.first_spoilt:
            return False
        return await num_dropped(self._rig) - self._num_dropped >= attempt.first_spoilt


async def num_dropped(rig: Rig) -> float:
    return await counter(rig.stack.workers("decode"), "diptych_frames_dropped")


async def test_what_has_arrived_is_kept_when_its_prefill_worker_dies(rig: Rig) -> None:
    (expected,) = await rig.expected("all", ASKS)
    decode = rig.stack.workers("decode")
    skipped = await counter(decode, "diptych_kv_blocks_skipped")
    tape = Tape(rig.proxy, {0: 3})
    killer = Killer(rig, tape, await num_dropped(rig))
    asking = asyncio.create_task(rig.ask(ASKS, "one dies"))
    first = await killer.strike(0)
    (heard,) = await asking
    assert difference(heard, expected) == ""

    second, kept = tape.attempts[1], len(first.received)
    assert first.granted_from == 0 and kept >= 3 * CHUNK_BLOCKS and first.received == set(range(kept))
    assert second.prefill_worker != first.prefill_worker
    assert second.granted_from == kept
    assert second.received == set(range(kept, PROMPT_BLOCKS + 1))  # what was missing, and nothing else
    assert await counter(decode, "diptych_kv_blocks_skipped") == skipped + kept


async def test_what_arrived_from_two_that_died_is_not_computed_again(rig: Rig) -> None:
    """The second goes on where the first was killed, and the decode worker, alone then, where the second was."""
    (expected,) = await rig.expected("all", ASKS)
    decode = rig.stack.workers("decode")
    asked, hits = [await counter(decode, f"vllm:prefix_cache_{what}") for what in ("queries", "hits")]
    tape = Tape(rig.proxy, {0: 3, 1: 2})
    killer = Killer(rig, tape, await num_dropped(rig))
    asking = asyncio.create_task(rig.ask(ASKS, "two die"))
    first, second = await killer.strike(0), await killer.strike(1)
    (heard,) = await asking
    assert difference(heard, expected) == ""

    assert second.granted_from == len(first.received) and len(second.received) >= 2 * CHUNK_BLOCKS
    kept = len(first.received | second.received)
    assert first.received | second.received == set(range(kept)) and kept < PROMPT_BLOCKS
    assert await counter(decode, "vllm:prefix_cache_queries") == asked + len(PROMPT)
    assert await counter(decode, "vllm:prefix_cache_hits") == hits + kept * BLOCK_SIZE

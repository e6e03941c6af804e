"""vLLM as `VllmEngine` sees it, without vLLM: a client that samples a token per step, a link, and block events."""

from __future__ import annotations

import asyncio
import itertools
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from common.config import WorkerConfig
from common.engine.kv import BlockLog
from common.engine.vllm.block_events import CachedBlocks
from common.engine.vllm.client import Added, CoreDied, Drafts, Output
from common.engine.vllm.duty import VllmDuty
from common.engine.vllm.link import LinkEvent, StepsDone
from common.engine.vllm.model import CoreThread
from common.engine.worker import DutyOffer, Engine, ModelFacts, Send, WorkerMetrics, WorkerParts
from common.errors import RankLost
from common.grammar import finish_reason
from common.latency import StepShape
from common.wire import Role

from ....foreign_engine import FACTS, Faults, next_token

STEP_S = 0.001
NOT_FINITE = 255
"""Prompts that begin with this token have no vector."""
REJECTED = 7
"""Token that no grammar allows."""


def pack(tokens: list[int]) -> bytes:
    """Return the vector of a prompt: its first token and its length."""
    return struct.pack("<2f", tokens[0], len(tokens))


@dataclass(eq=False)
class PretendedAnswer:
    """A request. `computed` becomes true with its first step."""

    added: Added
    llm: PretendedVllm
    token_ids: list[int] = field(init=False)
    outputs: asyncio.Queue[Output | Exception] = field(default_factory=asyncio.Queue)
    is_running: bool = False

    def __post_init__(self) -> None:
        self.token_ids = list(self.added.token_ids)

    @property
    def num_new(self) -> int:
        return len(self.token_ids) - len(self.added.token_ids)

    async def next(self) -> Output:
        output = await self.outputs.get()
        if isinstance(output, Exception):
            raise output
        return output

    async def abort(self) -> None:
        self.llm.answers = [each for each in self.llm.answers if each is not self]


class PretendedLink:
    """Orders to ranks, in the order in which they were given."""

    num_dropped = 0

    def __init__(self) -> None:
        self.orders: list[Any] = []
        self.is_broken = False

    def send(self, rank: int | None, message: object) -> bool:
        self.orders.append(message)
        return not self.is_broken

    def take(self) -> list[Any]:
        orders, self.orders = self.orders, []
        return orders


class PretendedVllm:
    """A `VllmModel` of one or more ranks, and the client of its vLLM."""

    speculates, failure, is_leaving, adapters, vocab_size, pooling = False, "", False, None, 256, ""
    eos_token_ids = (0,)
    has_first_runner = False
    max_incoming = 10**6
    num_preemptions, drafts = 0, Drafts()
    kv_address = "tcp://127.0.0.1:7,8"

    def __init__(self, faults: Faults, world_size: int = 1, facts: ModelFacts = FACTS) -> None:
        self.faults, self.world_size, self.facts = faults, world_size, facts
        self.thread, self.link, self.client = CoreThread(), PretendedLink(), self
        self.cached = CachedBlocks(facts.block_size, BlockLog(1))
        self.answers: list[PretendedAnswer] = []
        self.num_resets = 0
        self.all_added: list[Added] = []
        self.has_died = False
        self._numbers = itertools.count()
        self._known: dict[bytes, None] = {}
        self.on_event: Any = lambda rank, event: None
        self.thread.loop.call_soon_threadsafe(lambda: self.thread.keep(self._run(), "pretended vllm"))

    def adopt(self, config: WorkerConfig, block_log: BlockLog) -> None:
        """Serve the engine of a new rig."""
        self.facts = replace(self.facts, max_num_seqs=config.places)
        self.cached = CachedBlocks(self.facts.block_size, block_log)
        self.answers, self._numbers, self._known = [], itertools.count(), {}

    def event(self, rank: int, event: LinkEvent) -> None:
        """Deliver an event of a rank."""
        self.thread.loop.call_soon_threadsafe(self.on_event, rank, event)

    def fits(self, num_tokens: int, first_block: int) -> bool:
        return num_tokens - first_block * self.facts.block_size <= self.max_incoming

    def num_skipped(self, num_cached: int) -> int:
        return num_cached

    def core_problem(self) -> str:
        return "vLLM has failed"

    def register_metrics(self, metrics: WorkerMetrics) -> None: ...

    def close(self) -> None:
        assert self.thread.close()

    # ------------------------------------------------------------ the client

    async def add(self, added: Added) -> PretendedAnswer:
        self.all_added.append(added)
        self.answers.append(PretendedAnswer(added, self))
        return self.answers[-1]

    async def reset_prefix_cache(self) -> bool:
        self.num_resets += 1
        if self.answers:
            return False
        self._known.clear()
        return True

    # ------------------------------------------------------------ steps

    async def _run(self) -> None:
        had_some = False
        while True:
            await asyncio.sleep(STEP_S + self.faults.pace_s)
            running = self.answers[: self.facts.max_num_seqs]
            if had_some and not running:  # vLLM runs a step without tokens after the last abort
                self.on_event(-1, self._step([], time.monotonic()))
            had_some = bool(running)
            if not running:
                continue
            began = time.monotonic()
            try:
                self.faults.check()
            except RankLost as error:
                self.has_died = True
                self._end(running, CoreDied(str(error)))
                self.has_died = False
                continue
            except Exception as error:
                self._end(running, error)
                continue
            for answer in running:
                self._sample(answer)
            self.on_event(-1, self._step(running, began))

    def _sample(self, answer: PretendedAnswer) -> None:
        added, tokens = answer.added, answer.token_ids
        if added.params.pooling:
            is_finite = tokens[0] != NOT_FINITE
            answer.outputs.put_nowait(Output(reason="stop", vector=pack(tokens) if is_finite else b""))
            self.answers.remove(answer)
            return
        if not answer.is_running:
            answer.is_running = True
            self._cache(tokens)
        tokens.append(next_token(tokens))
        num_output = added.earlier + answer.num_new
        reason = finish_reason(
            added.params,
            self.eos_token_ids,
            num_output_tokens=num_output,
            token_id=tokens[-1],
            num_tokens=len(tokens),
            max_model_len=self.facts.max_model_len,
        )
        if added.most_tokens and answer.num_new >= added.most_tokens:
            reason = reason or "length"
        if added.params.grammar:  # it allows one token, and vLLM ends the request once its grammar rejects another
            answer.outputs.put_nowait(Output((tokens[-1], REJECTED), reason="error", queue_s=0.0))
            self.answers.remove(answer)
            return
        counts = {"num_preemptions": self.num_preemptions, "drafts": self.drafts if reason else Drafts()}
        answer.outputs.put_nowait(Output((tokens[-1],), reason=reason, queue_s=0.0, **counts))
        if reason:
            self.answers.remove(answer)

    def _cache(self, tokens: list[int]) -> None:
        """Publish the full blocks of a prompt under hashes of our own."""
        size, parent = self.facts.block_size, None
        for first in range(0, len(tokens) - size + 1, size):
            name = repr(tokens[: first + size]).encode()
            if name not in self._known:
                self._known[name] = None
                event = {
                    "type": "BlockStored",
                    "block_hashes": [name],
                    "parent_block_hash": parent,
                    "token_ids": tokens[first : first + size],
                    "block_size": size,
                }
                self.cached.on_batch(next(self._numbers), msgspec.msgpack.encode([0.0, [event]]))
            parent = name

    def _step(self, running: list[PretendedAnswer], began: float) -> StepsDone:
        size, total = self.facts.block_size, self.facts.num_blocks
        context = sum(len(each.token_ids) for each in running)
        return StepsDone(
            steps=((StepShape.of_rows(len(running), context), max(1e-4, time.monotonic() - began)),),
            num_running=len(running),
            num_waiting=len(self.answers) - len([each for each in running if each in self.answers]),
            num_waiting_tokens=sum(len(each.token_ids) for each in self.answers if not each.is_running),
            num_context_tokens=context,
            num_free_blocks=total - sum(-(-len(each.token_ids) // size) for each in running if each in self.answers),
            num_total_blocks=total,
        )

    def _end(self, running: list[PretendedAnswer], error: Exception) -> None:
        for answer in running:
            answer.outputs.put_nowait(error)
        self.answers = [each for each in self.answers if each not in running]


class PretendedDuty(VllmDuty):
    """A role over a vLLM that outlives it."""

    def build_engine(self, model: Any, send: Send) -> Engine:
        model.adopt(self.config, self.block_log)
        return super().build_engine(model, send)


def pretended_offer(role: Role, config: WorkerConfig, model: PretendedVllm) -> DutyOffer[Any]:
    def begin(parts: WorkerParts) -> PretendedDuty:
        return PretendedDuty(role, config, parts)

    return DutyOffer(role, config, lambda files: model, begin)


@contextmanager
def pretended_vllm(faults: Faults, world_size: int = 1) -> Iterator[PretendedVllm]:
    model = PretendedVllm(faults, world_size)
    yield model
    model.close()

"""What routers rely on of any engine: ours, one of another make, and that of vLLM without vLLM.

A new engine gets a `Subject` in `SUBJECTS`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import zmq

from common.blocks import BlockHasher
from common.config import DecodeWorkerConfig
from common.engine.run.runner import ModelRunner
from common.engine.worker.contract import (
    DutyOffer,
    EngineStatus,
    RequestReceived,
    RouterLost,
    ServedModel,
    WorkerParts,
)
from common.engine.worker.loop_model import LoopModel
from common.engine.worker.metrics import WorkerMetrics
from common.engine.worker.vitals import WorkerIdentity
from common.errors import RankLost
from common.model_files.resolve import resolve_model
from common.wire.message_fields import pack_tokens
from common.wire.messages import (
    SHORT_HASH_BYTES,
    AbortRequest,
    DecodeRequest,
    Message,
    PrefillRequest,
    RequestFailed,
    ResetPrefixCache,
    TokenDelta,
    TokenOutput,
)
from common.wire.sampling_params import SamplingParams
from decode_worker.duty import decode_offer

from ....engine_rig import prompt
from ....foreign_engine import Faults, ForeignModel, foreign_offer
from ....waiting import until
from ..vllm.pretended import pretended_offer, pretended_vllm

ROUTER, OTHER = b"router", b"other"
LONG = 400
"""Output tokens of an answer that does not end within a test."""
PACE_S = 0.02


@dataclass(frozen=True)
class Subject:
    """An engine to test: its model, its offer for settings, and the faults of its steps."""

    model: ServedModel
    offer: Callable[[DecodeWorkerConfig], DutyOffer[Any]]
    faults: Faults


@contextmanager
def own() -> Iterator[Subject]:
    faults, run = Faults(), ModelRunner.run

    def run_or_fail(self: ModelRunner, *arguments: Any) -> Any:
        time.sleep(faults.pace_s)
        faults.check()
        return run(self, *arguments)

    config = DecodeWorkerConfig(model="tiny-random", num_blocks=256, threads=1, dtype="float32")
    model = LoopModel.load(resolve_model("tiny-random"), config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "run", run_or_fail)
        yield Subject(model, decode_offer, faults)
    model.close()


@contextmanager
def foreign() -> Iterator[Subject]:
    faults = Faults()
    model = ForeignModel(faults)
    yield Subject(model, lambda config: foreign_offer(config, model), faults)


@contextmanager
def vllm() -> Iterator[Subject]:
    faults = Faults()
    with pretended_vllm(faults) as model:
        yield Subject(model, lambda config: pretended_offer("decode", config, model), faults)


SUBJECTS: dict[str, Callable[[], AbstractContextManager[Subject]]] = {"own": own, "foreign": foreign, "vllm": vllm}


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    with SUBJECTS[request.param]() as made:
        yield made


@dataclass
class Rig:
    """A started engine of a decode role, and what it sent. `early` are messages sent before the status had them."""

    subject: Subject
    max_num_seqs: int = 8
    max_waiting: int = 64
    sent: list[tuple[bytes, Message]] = field(default_factory=list)
    early: list[Message] = field(default_factory=list)
    serial: int = 0

    def __post_init__(self) -> None:
        config = DecodeWorkerConfig(
            enable_prefix_caching=True, max_num_seqs=self.max_num_seqs, max_waiting=self.max_waiting, threads=1
        )
        offer = self.subject.offer(config)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        identity = WorkerIdentity("w", "decode", "decode", 1)
        metrics = WorkerMetrics("m", "w", EngineStatus, role="decode")
        self.duty = offer.begin(WorkerParts(identity, self.context, None, metrics))
        self.duty.bind()
        self.serials: dict[str, int] = {}
        self.engine = self.duty.build_engine(self.subject.model, self._sent)
        self.engine.start()

    def _sent(self, messages: list[tuple[bytes, Message]]) -> None:
        for router, message in messages:
            names = [each.request_id for each in getattr(message, "outputs", (message,))]
            if any(self.serials[name] > self.engine.status.serials.get(router, 0) for name in names):
                self.early.append(message)
        self.sent += messages

    def ask(
        self,
        name: str = "a",
        num_tokens: int = LONG,
        *,
        tokens: list[int] | None = None,
        router: bytes = ROUTER,
        **fields: Any,
    ) -> None:
        """Send a request for `num_tokens` tokens."""
        self.serial += 1
        self.serials.setdefault(name, self.serial)
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        values: dict[str, Any] = {"attempt": 0, "serial": self.serial} | fields
        packed = pack_tokens(prompt(40) if tokens is None else tokens)
        self.tell(DecodeRequest(request_id=name, prompt=packed, params=params, **values), router)

    def tell(self, message: Message, router: bytes = ROUTER) -> None:
        assert self.engine.submit(RequestReceived(router, message))

    def deltas(self, name: str = "a", attempt: int = 0) -> list[TokenDelta]:
        outputs = [message for _, message in self.sent if isinstance(message, TokenOutput)]
        found = [
            delta for each in outputs for delta in each.outputs if (delta.request_id, delta.attempt) == (name, attempt)
        ]
        return [delta for delta in found if delta.token_ids or delta.finish_reason]

    def tokens(self, name: str = "a", attempt: int = 0) -> list[int]:
        return [token for delta in self.deltas(name, attempt) for token in delta.token_ids]

    def failures(self, name: str = "a") -> list[RequestFailed]:
        return [m for _, m in self.sent if isinstance(m, RequestFailed) and m.request_id == name]

    def has_ended(self, name: str = "a", attempt: int = 0) -> bool:
        return any(delta.finish_reason for delta in self.deltas(name, attempt))

    async def applied(self) -> None:
        """Wait until all commands were applied and published."""
        await until(lambda: not self.engine.has_commands)
        known = self.engine.num_steps
        await until(lambda: self.engine.num_steps > known + 1)

    async def stop(self) -> None:
        if self.engine.alive:
            assert await asyncio.to_thread(self.engine.stop)
        await asyncio.to_thread(self.context.term)


@pytest.fixture
async def make(subject: Subject) -> AsyncIterator[Callable[..., Rig]]:
    rigs: list[Rig] = []
    subject.faults.pace_s, subject.faults.error = 0.0, None

    def made(**options: Any) -> Rig:
        rigs.append(Rig(subject, **options))
        return rigs[-1]

    yield made
    subject.faults.pace_s = 0.0
    for rig in rigs:
        await rig.stop()
        assert not rig.early, "a heartbeat before these messages would have lacked their requests"


@pytest.fixture
async def rig(make: Callable[..., Rig]) -> Rig:
    return make()


@pytest.fixture
async def slow(subject: Subject, make: Callable[..., Rig]) -> Rig:
    """Long answers do not end by themselves."""
    subject.faults.pace_s = PACE_S
    return make()


async def test_an_answer_is_whole_and_ends_with_its_reason(rig: Rig) -> None:
    rig.ask("a", 12)
    rig.ask("b", 12, router=OTHER)
    await until(lambda: rig.has_ended("a") and rig.has_ended("b"))
    assert rig.tokens("a") == rig.tokens("b") and len(rig.tokens("a")) == 12
    position = 0
    for delta in rig.deltas("a"):
        assert delta.index == position
        position += len(delta.token_ids)
    assert [delta.finish_reason for delta in rig.deltas("a") if delta.finish_reason] == ["length"]
    assert {router for router, message in rig.sent if isinstance(message, TokenOutput)} == {ROUTER, OTHER}
    await until(lambda: rig.engine.is_empty and not rig.engine.status.num_active)
    assert rig.engine.check_integrity().owned == 0


async def test_what_it_cannot_serve_is_refused_and_counted(rig: Rig) -> None:
    rig.ask("long", tokens=prompt(rig.subject.model.facts.max_model_len + 1))
    rig.ask("adapter", adapter="ab" * 16)
    rig.serials["prefill"] = 0
    rig.tell(
        PrefillRequest(request_id="prefill", attempt=3, prompt=pack_tokens([1]), params=SamplingParams(max_tokens=1))
    )
    await until(lambda: len(rig.sent) == 3)
    long, adapter, prefill = (rig.failures(name)[0] for name in ("long", "adapter", "prefill"))
    assert (long.phase, long.retryable) == ("queue", False)
    assert adapter.retryable, "another worker may have it"
    assert (prefill.attempt, prefill.retryable) == (3, False)
    assert rig.engine.status.serials == {ROUTER: 2} and rig.engine.is_empty


async def test_a_full_worker_refuses_for_now(subject: Subject, make: Callable[..., Rig]) -> None:
    subject.faults.pace_s = PACE_S
    rig = make(max_num_seqs=1, max_waiting=1)
    for name in ("a", "b", "c"):
        rig.ask(name)
        await rig.applied()
    await until(lambda: rig.failures("c"))
    assert rig.failures("c")[0].retryable and not rig.failures("a") + rig.failures("b")
    assert (rig.engine.status.num_running, rig.engine.status.num_waiting) == (1, 1)
    assert not rig.deltas("b")


async def test_only_its_router_aborts_an_attempt(slow: Rig) -> None:
    slow.ask(attempt=1)
    await until(lambda: slow.deltas("a", 1))
    slow.tell(AbortRequest(request_id="a", attempt=0))
    slow.tell(AbortRequest(request_id="a", attempt=1), OTHER)
    await slow.applied()
    assert not slow.engine.is_empty
    slow.tell(AbortRequest(request_id="a", attempt=1))
    await until(lambda: slow.engine.is_empty)
    num_sent = len(slow.sent)
    await slow.applied()
    assert len(slow.sent) == num_sent and not slow.failures() and not slow.has_ended(attempt=1)
    assert slow.engine.status.num_active == slow.engine.status.blocks.owned == 0


async def test_a_duplicate_is_ignored_and_a_new_attempt_replaces_the_old(rig: Rig) -> None:
    rig.ask("a", 12)
    await until(rig.has_ended)
    rig.subject.faults.pace_s = PACE_S
    rig.ask("b", attempt=2)
    await until(lambda: rig.deltas("b", 2))
    for attempt in (1, 2):
        rig.ask("b", 12, attempt=attempt)
        await rig.applied()
    known = len(rig.tokens("b", 2))
    await until(lambda: len(rig.tokens("b", 2)) > max(known, 12))
    assert [delta.index for delta in rig.deltas("b", 2)][-1] >= 12 and not rig.deltas("b", 1)
    rig.ask("b", 12, attempt=3)
    await until(lambda: rig.has_ended("b", 3))
    assert not rig.has_ended("b", 2) and not rig.failures("b")
    assert rig.tokens("b", 3) == rig.tokens("a")
    assert rig.engine.status.serials == {ROUTER: 5}


async def test_an_id_belongs_to_one_router(slow: Rig) -> None:
    slow.ask("a", 20)
    await until(slow.deltas)
    slow.ask("a", router=OTHER, attempt=5)
    await until(slow.failures)
    ((router, failed),) = ((router, message) for router, message in slow.sent if isinstance(message, RequestFailed))
    assert (router, failed.attempt, failed.retryable) == (OTHER, 5, False)
    await until(slow.has_ended)


async def test_requests_of_a_lost_router_end_in_silence(slow: Rig) -> None:
    slow.ask("a")
    slow.ask("b", 20, router=OTHER)
    await until(lambda: slow.deltas("a"))
    await until(lambda: set(slow.engine.status.serials) == {ROUTER, OTHER})
    slow.engine.notify(RouterLost(ROUTER))
    await slow.applied()
    num_tokens = len(slow.tokens("a"))
    assert set(slow.engine.status.serials) == {OTHER}
    await until(lambda: slow.has_ended("b"))
    await until(lambda: slow.engine.is_empty)
    assert len(slow.tokens("a")) == num_tokens and not slow.failures("a")


async def test_a_deadline_ends_a_request(slow: Rig) -> None:
    slow.ask(deadline_s=0.1)
    await until(slow.failures)
    (failed,) = slow.failures()
    assert not failed.retryable and failed.phase and "deadline" in failed.message
    await until(lambda: slow.engine.is_empty and not slow.engine.status.num_active)


async def test_the_status_counts_requests_and_blocks(slow: Rig) -> None:
    total = slow.subject.model.facts.num_blocks
    assert slow.engine.status.num_active == 0 and not slow.engine.has_commands
    names = ("a", "b", "c")
    for name in names:
        slow.ask(name)
    await until(lambda: all(slow.deltas(name) for name in names))
    status = slow.engine.status
    assert (status.num_running, status.num_active, status.serials) == (3, 3, {ROUTER: 3})
    assert status.blocks.total == total and status.blocks.owned >= 3
    assert not slow.engine.is_empty
    for name in names:
        slow.tell(AbortRequest(request_id=name, attempt=0))
    await until(lambda: slow.engine.is_empty and not slow.engine.has_commands)
    await slow.applied()
    assert slow.engine.status.num_active == 0 and slow.engine.status.blocks.total == total


async def test_an_idle_engine_shows_that_it_lives(rig: Rig) -> None:
    known, engine = rig.engine.num_steps, rig.engine
    await until(lambda: engine.num_steps > known + 2)
    assert engine.alive and engine.failure is None and engine.turn_limit_s > 0.0
    assert not engine.is_stuck(time.monotonic()) and engine.is_stuck(time.monotonic() + 10_000.0)


async def test_cached_blocks_are_told_and_forgotten(rig: Rig) -> None:
    size = rig.subject.model.facts.block_size
    tokens = prompt(2 * size + 1)
    rig.ask("a", 2, tokens=tokens)
    await until(lambda: rig.has_ended() and rig.engine.is_empty)
    wanted = {each[:SHORT_HASH_BYTES] for each in BlockHasher(size).extend(tokens)}
    await until(lambda: wanted <= hashes_of(rig.duty.block_log.snapshot()[0].hashes))
    stored = b"".join(event.stored for event in rig.duty.block_log.take())
    assert wanted <= hashes_of(stored) and rig.engine.status.blocks.cached >= 2
    rig.tell(ResetPrefixCache(request_id=""))
    await until(lambda: not rig.duty.block_log.snapshot()[0].hashes)
    assert any(event.cleared for event in rig.duty.block_log.take())


async def test_a_failed_step_fails_its_requests_and_no_other(slow: Rig) -> None:
    slow.ask("a")
    await until(slow.deltas)
    slow.subject.faults.error = ValueError("no such luck")
    await until(slow.failures)
    slow.subject.faults.error = None
    (failed,) = slow.failures()
    assert failed.retryable and "no such luck" in failed.message
    assert slow.engine.alive
    slow.ask("b", 3)
    await until(lambda: slow.has_ended("b"))


async def test_a_dead_engine_says_nothing_to_routers(slow: Rig) -> None:
    slow.ask("a")
    await until(slow.deltas)
    slow.subject.faults.error = RankLost("rank 1 is gone")
    await until(lambda: not slow.engine.alive)
    assert isinstance(slow.engine.failure, RankLost) and not slow.failures() and not slow.has_ended()
    assert await asyncio.to_thread(slow.engine.stop)


async def test_an_engine_stops_with_requests(slow: Rig) -> None:
    slow.ask("a")
    await until(slow.deltas)
    slow.ask("b")
    assert await asyncio.to_thread(slow.engine.stop)
    assert not slow.engine.alive and slow.engine.failure is None
    slow.engine.check_integrity()
    assert not slow.failures("a") + slow.failures("b") and not slow.has_ended()


def hashes_of(joined: bytes) -> set[bytes]:
    return {joined[at : at + SHORT_HASH_BYTES] for at in range(0, len(joined), SHORT_HASH_BYTES)}

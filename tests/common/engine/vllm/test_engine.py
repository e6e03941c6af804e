"""KV orders of `VllmEngine` to the ranks, and what their answers lead to. Serving is tested by the contract's tests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq

from common.config import DecodeWorkerConfig, PrefillWorkerConfig
from common.engine.vllm import engine as engine_module
from common.engine.vllm.client import Drafts
from common.engine.vllm.link import (
    SCHEDULER,
    Admit,
    Announced,
    Arrived,
    Cancel,
    Done,
    Expect,
    Forget,
    RankFailed,
    Sent,
    TransferLost,
)
from common.engine.worker import EngineStatus, RequestReceived, WorkerMetrics, WorkerParts
from common.engine.worker.vitals import WorkerIdentity
from common.wire import Pooling, Role, SamplingParams, pack_tokens
from common.wire.messages import (
    AbortRequest,
    DecodeRequest,
    HandOver,
    KVDone,
    KVTarget,
    Message,
    PooledOutput,
    PrefillRequest,
    RequestFailed,
    ResetPrefixCache,
    TokenDelta,
    TokenOutput,
)

from ....engine_rig import prompt
from ....foreign_engine import FACTS, Faults, next_token
from ....waiting import until
from .pretended import NOT_FINITE, PretendedVllm, pack, pretended_offer, pretended_vllm

ROUTER = b"router"
TARGET = KVTarget("d-0", 4, "tcp://127.0.0.1:7,8")
PROMPT = prompt(70)
PACE_S = 0.05
FIRST = next_token(PROMPT)
OTHER = FIRST ^ 1
LABELS = {"model_name": "m", "engine": "w"}


@pytest.fixture(scope="module")
def model() -> Iterator[PretendedVllm]:
    with pretended_vllm(Faults(), world_size=2) as made:
        yield made


@dataclass
class Rig:
    model: PretendedVllm
    role: Role
    sent: list[tuple[bytes, Message]] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = (PrefillWorkerConfig if self.role == "prefill" else DecodeWorkerConfig)(max_num_seqs=4, threads=1)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        identity = WorkerIdentity("w", self.role, self.role, 1)
        self.metrics = WorkerMetrics("m", "w", EngineStatus, role=self.role)
        duty = pretended_offer(self.role, config, self.model).begin(
            WorkerParts(identity, self.context, None, self.metrics)
        )
        self.model.link.take()
        self.engine: Any = duty.build_engine(self.model, self.sent.extend)
        self.engine.start()

    def tell(self, message: Message, router: bytes = ROUTER) -> None:
        assert self.engine.submit(RequestReceived(router, message))

    def prefill(self, name: str = "a", **fields: Any) -> None:
        values: dict[str, Any] = {"attempt": 1, "decode": TARGET} | fields
        params = SamplingParams(max_tokens=9, temperature=0.0)
        self.tell(PrefillRequest(request_id=name, prompt=pack_tokens(PROMPT), params=params, **values))

    def decode(self, name: str = "a", num_tokens: int = 4, router: bytes = ROUTER, **fields: Any) -> None:
        values: dict[str, Any] = {"attempt": 1, "prefill_worker": "p-0"} | fields
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        self.tell(DecodeRequest(request_id=name, prompt=pack_tokens(PROMPT), params=params, **values), router)

    async def orders(self, kind: type[Any]) -> list[Any]:
        """Wait for orders of a kind, and return them."""
        await until(lambda: any(isinstance(each, kind) for each in self.model.link.orders))
        return [each for each in self.model.link.orders if isinstance(each, kind)]

    def deltas(self, name: str = "a") -> list[TokenDelta]:
        outputs = [message for _, message in self.sent if isinstance(message, TokenOutput)]
        found = [delta for each in outputs for delta in each.outputs if delta.request_id == name]
        return [delta for delta in found if delta.token_ids or delta.finish_reason]

    def failures(self) -> list[RequestFailed]:
        return [message for _, message in self.sent if isinstance(message, RequestFailed)]


@pytest.fixture
async def make(model: PretendedVllm) -> AsyncIterator[Callable[[Role], Rig]]:
    rigs: list[Rig] = []

    def made(role: Role) -> Rig:
        rigs.append(Rig(model, role))
        return rigs[-1]

    yield made
    model.faults.pace_s, model.link.is_broken = 0.0, False
    for rig in rigs:
        assert rig.engine.stop()
        rig.context.term()


@pytest.fixture
def prefill(make: Callable[[Role], Rig]) -> Rig:
    return make("prefill")


@pytest.fixture
def decode(make: Callable[[Role], Rig]) -> Rig:
    return make("decode")


def arrived(first_token: int, **fields: Any) -> Arrived:
    done = KVDone(request_id="a", attempt=1, first_token=first_token, num_cached_tokens=5)
    values: dict[str, Any] = {"request_id": "a", "attempt": 1, "done": done, "num_bytes": 10, "transfer_s": 0.5}
    return Arrived(**values | fields)


def sent(**fields: Any) -> Sent:
    return Sent(**{"request_id": "a", "attempt": 1, "reason": "", "num_bytes": 10} | fields)


async def test_a_prompt_is_sent_and_its_first_token_reported_at_once(prefill: Rig, model: PretendedVllm) -> None:
    prefill.prefill()
    (done,) = await prefill.orders(Done)
    added = model.all_added[-1]
    assert added.most_tokens == 1 and added.transfer.send is not None and added.transfer.send.target == TARGET
    token = next_token(PROMPT)
    assert done.done.first_token == token
    await until(prefill.deltas)
    assert [(delta.token_ids, delta.finish_reason) for delta in prefill.deltas()] == [((token,), "")]
    model.event(0, sent())
    await until(lambda: prefill.engine.status.num_transferring == 1)
    assert not prefill.engine.is_empty, "rank 1 still sends"
    model.event(1, sent())
    await until(lambda: prefill.engine.is_empty)
    assert not prefill.failures() and not [each for each in model.link.orders if isinstance(each, Cancel)]


async def test_a_lost_transfer_fails_the_prompt_for_now(prefill: Rig, model: PretendedVllm) -> None:
    prefill.prefill()
    await prefill.orders(Done)
    model.event(1, sent(reason="the decode worker is gone"))
    await until(prefill.failures)
    (failed,) = prefill.failures()
    assert (failed.phase, failed.retryable, failed.message) == ("transfer", True, "the decode worker is gone")
    (cancel,) = await prefill.orders(Cancel)
    assert cancel.key == ("a", 1) and not cancel.phase


async def test_a_permanent_failure_reaches_the_decode_worker(prefill: Rig, model: PretendedVllm) -> None:
    model.faults.pace_s = PACE_S
    prefill.prefill(deadline_s=0.01)
    (cancel,) = await prefill.orders(Cancel)
    assert cancel.phase in ("prefill", "transfer") and "deadline" in cancel.reason


@pytest.fixture
def pooling(prefill: Rig, model: PretendedVllm, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sends a prompt of tokens to a worker whose model pools prompts."""
    monkeypatch.setattr(model, "pooling", "last")

    def ask(tokens: list[int], pooling: Pooling = "last", **fields: Any) -> None:
        params = SamplingParams(max_tokens=1, pooling=pooling)
        values: dict[str, Any] = {"attempt": 1} | fields
        prefill.tell(PrefillRequest(request_id="a", prompt=pack_tokens(tokens), params=params, **values))

    return ask


async def test_the_vector_of_a_prompt_precedes_its_end(prefill: Rig, pooling: Callable[..., None]) -> None:
    longest = prompt(FACTS.max_model_len)
    pooling(longest)
    await until(lambda: prefill.deltas())
    (delta,) = prefill.deltas()
    messages = [message for _, message in prefill.sent if isinstance(message, PooledOutput | TokenOutput)]
    assert isinstance(messages[0], PooledOutput) and messages[0].values == pack(longest)
    assert (delta.token_ids, delta.finish_reason) == ((), "stop")
    assert prefill.engine.is_empty


@pytest.mark.parametrize(
    ("tokens", "fields", "why"),
    [
        (PROMPT, {"pooling": "mean"}, "supports pooling 'last'"),
        (PROMPT, {"decode": TARGET}, "must not have a decode worker"),
        ([NOT_FINITE, 1], {}, "not finite"),
        (prompt(FACTS.max_model_len + 1), {}, f"maximum is {FACTS.max_model_len}"),
    ],
    ids=["another pooling", "a decode worker", "not finite", "too long"],
)
async def test_a_prompt_without_a_vector_fails(
    prefill: Rig, pooling: Callable[..., None], tokens: list[int], fields: dict[str, Any], why: str
) -> None:
    pooling(tokens, **fields)
    await until(prefill.failures)
    (failed,) = prefill.failures()
    assert why in failed.message and not failed.retryable


@pytest.mark.parametrize(
    ("rules", "phase", "why"),
    [
        ({"allowed_token_ids": (OTHER,)}, "sampling", "allowed_token_ids has no token that the other rules allow next"),
        ({"grammar": "start: /x/"}, "grammar", "the answer's format has no token that the other rules allow next"),
    ],
    ids=["allowed tokens", "grammar"],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_rules_that_no_token_fits_fail_the_request_for_good(
    make: Callable[[Role], Rig], role: Role, rules: dict[str, Any], phase: str, why: str
) -> None:
    """vLLM then samples some token, which must not reach the client."""
    rig = make(role)
    params = SamplingParams(max_tokens=9, temperature=0.0, **rules)
    kind = {"prefill": PrefillRequest, "decode": DecodeRequest}[role]
    rig.tell(kind(request_id="a", attempt=1, prompt=pack_tokens(PROMPT), params=params))
    await until(rig.failures)
    (failed,) = rig.failures()
    assert why in failed.message and (failed.phase, failed.retryable) == (phase, False)
    tokens = [token for delta in rig.deltas() for token in delta.token_ids]
    assert tokens == ([FIRST] if phase == "grammar" and role == "decode" else []) and rig.engine.is_empty
    assert rig.sent[-1][1] is failed, "tokens follow the failure"


async def test_an_answer_of_one_token_sends_no_kv(prefill: Rig, model: PretendedVllm) -> None:
    prefill.prefill(decode=None)
    await until(prefill.deltas)
    assert model.all_added[-1].transfer.send is None and not model.link.orders
    await until(lambda: prefill.engine.is_empty)


async def test_kv_of_all_ranks_precedes_the_answer(decode: Rig, model: PretendedVllm) -> None:
    decode.decode()
    (expect,) = await decode.orders(Expect)
    assert (expect.key, expect.num_tokens, expect.first_block) == (("a", 1), len(PROMPT), 0)
    num_added, token = len(model.all_added), next_token(PROMPT)
    model.event(0, arrived(token))
    await until(lambda: decode.engine.status.num_transferring == 1)
    assert len(model.all_added) == num_added
    model.event(1, arrived(token))
    await until(lambda: any(delta.finish_reason for delta in decode.deltas()))
    added = model.all_added[-1]
    assert list(added.token_ids) == [*PROMPT, token] and added.earlier == 1
    assert added.transfer.load is not None and added.transfer.load.num_tokens == len(PROMPT)
    tokens = [each for delta in decode.deltas() for each in delta.token_ids]
    expected = list(PROMPT)
    for _ in range(4):
        expected.append(next_token(expected))
    assert tokens == expected[len(PROMPT) :] and decode.deltas()[0].index == 0
    timeline = decode.deltas()[-1].timeline
    assert timeline is not None and timeline.transfer_bytes == 20 and decode.deltas()[-1].num_cached_tokens == 5


async def test_all_ranks_admit_prompts_in_the_order_of_their_announcements(decode: Rig, model: PretendedVllm) -> None:
    for name in "abc":
        decode.decode(name)
    await until(lambda: len(decode.model.link.orders) == 3)
    decode.tell(AbortRequest(request_id="b", attempt=1))
    await decode.orders(Forget)
    for name in "cba":
        model.event(0, Announced(request_id=name, attempt=1))
    await until(lambda: len(decode.model.link.orders) == 6)
    assert [each.key for each in await decode.orders(Admit)] == [("c", 1), ("a", 1)]


async def test_transfers_are_counted_by_transport_with_their_rate(decode: Rig, model: PretendedVllm) -> None:
    decode.decode()
    await decode.orders(Expect)
    for rank, busy_s in ((0, 2.0), (1, 0.0)):  # the second cannot measure it
        model.event(rank, arrived(7, transport="shm", busy_s=busy_s))
    await until(decode.deltas)
    labels = {"model_name": "m", "engine": "w"}
    get = decode.metrics.registry.get_sample_value
    assert get("diptych_kv_transfers_total", labels | {"transport": "shm"}) == 1
    assert get("diptych_kv_transfer_bytes_per_second_count", labels) == 1
    assert get("diptych_kv_transfer_bytes_per_second_sum", labels) == 5


async def test_preemptions_and_drafts_of_an_answer_are_reported(
    decode: Rig, model: PretendedVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "num_preemptions", 2)
    monkeypatch.setattr(model, "drafts", Drafts(3, 9, (2, 1)))
    decode.decode(prefill_worker="")
    await until(lambda: any(delta.finish_reason for delta in decode.deltas()))
    timeline = decode.deltas()[-1].timeline
    assert timeline is not None and timeline.num_preemptions == 2
    assert (timeline.num_drafts, timeline.num_draft_tokens, timeline.accepted_places) == (3, 9, (2, 1))


async def test_cached_blocks_are_not_sent_again(decode: Rig) -> None:
    decode.decode("first", prefill_worker="")
    await until(lambda: any(delta.finish_reason for delta in decode.deltas("first")))
    decode.decode()
    (expect,) = await decode.orders(Expect)
    assert expect.first_block == len(PROMPT) // decode.model.facts.block_size > 0


async def test_cached_blocks_that_vllm_cannot_use_alone_are_received(
    decode: Rig, model: PretendedVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a draft model, or several groups, vLLM has fewer blocks cached than group 0 has."""
    monkeypatch.setattr(model, "num_skipped", lambda num_cached: 0)
    decode.decode("first", prefill_worker="")
    await until(lambda: any(delta.finish_reason for delta in decode.deltas("first")))
    decode.decode()
    (expect,) = await decode.orders(Expect)
    num_added = len(model.all_added)
    for rank in (0, 1):
        model.event(rank, arrived(7))
    await until(lambda: len(model.all_added) > num_added)
    load = model.all_added[-1].transfer.load
    assert load is not None and (expect.first_block, load.first_block) == (0, 0)


async def test_kv_that_cannot_arrive_is_computed_here(
    decode: Rig, model: PretendedVllm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model, "max_incoming", 0)
    for name in ("a", "b"):
        decode.decode(name)
        await until(lambda name=name: any(delta.finish_reason for delta in decode.deltas(name)))
    assert [(each.key, each.reason) for each in model.link.take()] == [(("a", 1), ""), (("b", 1), "")]
    assert model.all_added[-1].transfer.load is None and not decode.failures()
    assert [token for delta in decode.deltas() for token in delta.token_ids][0] == FIRST
    (told,) = [one.message for one in caplog.records if "staging memory" in one.message]
    assert f"{len(PROMPT)} tokens" in told


async def test_a_first_token_may_be_the_last(decode: Rig, model: PretendedVllm) -> None:
    decode.decode(num_tokens=1)
    await decode.orders(Expect)
    num_added = len(model.all_added)
    for rank in (0, 1):
        model.event(rank, arrived(7))
    await until(decode.deltas)
    assert [(delta.token_ids, delta.finish_reason) for delta in decode.deltas()] == [((7,), "length")]
    (forget,) = await decode.orders(Forget)
    assert not forget.reason and len(model.all_added) == num_added and decode.engine.is_empty


@pytest.mark.parametrize(("phase", "is_retryable"), [("", True), ("prefill", False)])
async def test_lost_kv_fails_the_request(decode: Rig, model: PretendedVllm, phase: str, is_retryable: bool) -> None:
    decode.decode()
    await decode.orders(Expect)
    model.event(0, TransferLost(request_id="a", attempt=1, reason="checksum", phase=phase))
    await until(decode.failures)
    (failed,) = decode.failures()
    assert failed.retryable is is_retryable and failed.phase == (phase or "transfer") and "checksum" in failed.message
    assert (await decode.orders(Forget))[0].reason


async def test_tokens_of_no_whole_number_fail_one_request(decode: Rig, model: PretendedVllm) -> None:
    decode.decode()
    decode.decode("b")
    await until(lambda: len(model.link.orders) == 2)
    for rank in (0, 1):
        model.event(rank, arrived(FIRST, done=KVDone(request_id="a", attempt=1, first_token=FIRST, more_tokens=b"x")))
        model.event(rank, arrived(FIRST, request_id="b"))
    await until(decode.failures)
    (failed,) = decode.failures()
    assert (failed.request_id, failed.phase, failed.retryable) == ("a", "transfer", True)
    await until(lambda: any(delta.finish_reason for delta in decode.deltas("b")))


@pytest.mark.parametrize("event", ["a link event", "a task"])
async def test_an_error_of_our_own_ends_the_engine(decode: Rig, model: PretendedVllm, event: str) -> None:
    async def fail() -> None:
        raise ValueError("a bug")

    if event == "a task":
        model.thread.loop.call_soon_threadsafe(lambda: model.thread.keep(fail(), "block events"))
    else:
        decode.decode()
        await decode.orders(Expect)
        for rank in (0, 1):
            model.event(rank, arrived(FIRST, done=None))
    await until(lambda: not decode.engine.alive)
    model.thread.failure = ""


async def test_kv_of_a_dropped_request_is_forgotten(decode: Rig) -> None:
    decode.decode()
    decode.tell(AbortRequest(request_id="a", attempt=1))
    (forget,) = await decode.orders(Forget)
    assert forget.reason == "aborted"
    decode.decode("b", num_reserved_tokens=8)
    await until(decode.failures)
    assert [each.key for each in await decode.orders(Forget)][-1] == ("b", 1), "early KV of a refused request"


async def test_the_kv_of_a_request_survives_another_routers_of_the_same_id(decode: Rig, model: PretendedVllm) -> None:
    decode.decode()
    decode.decode(router=b"other")
    await until(decode.failures)
    assert [router for router, message in decode.sent if isinstance(message, RequestFailed)] == [b"other"]
    for rank in (0, 1):
        model.event(rank, arrived(FIRST))
    await until(lambda: any(delta.finish_reason for delta in decode.deltas()))
    assert not [each for each in model.link.orders if isinstance(each, Forget)]


async def test_a_handover_fails_the_request_so_that_its_router_continues_it(decode: Rig, model: PretendedVllm) -> None:
    model.faults.pace_s = PACE_S
    decode.decode(num_tokens=200, prefill_worker="")
    await until(decode.deltas)
    decode.tell(
        HandOver(request_id="a", attempt=1, new_attempt=2, target=TARGET, num_output_tokens=1, num_reserved_tokens=8)
    )
    await until(decode.failures)
    assert decode.failures()[0].retryable and decode.failures()[0].phase == "handover"
    await until(lambda: not model.answers)


async def test_a_rank_that_reads_no_orders_ends_the_engine(decode: Rig, model: PretendedVllm) -> None:
    model.link.is_broken = True
    decode.decode()
    await until(lambda: not decode.engine.alive)
    assert "rank" in str(decode.engine.failure) and not decode.sent


async def test_a_rank_that_fails_ends_an_idle_engine(decode: Rig, model: PretendedVllm) -> None:
    model.event(1, RankFailed(reason="IndexError: a head without an owner"))
    await until(lambda: not decode.engine.alive)
    assert str(decode.engine.failure) == "rank 1 has failed: IndexError: a head without an owner"


async def test_a_core_without_steps_is_stuck() -> None:
    with pretended_vllm(Faults()) as model:
        rig = Rig(model, "decode")
        rig.decode(num_tokens=200, prefill_worker="")
        await until(rig.deltas)
        model.faults.pace_s = 1000.0
        num_steps = rig.engine.num_steps
        await until(lambda: rig.engine._ticked_at > rig.engine._worked_at + 0.4)
        assert rig.engine.is_stuck(time.monotonic() + rig.engine.turn_limit_s)
        assert rig.engine.num_steps <= num_steps + 4, "routers see that it makes no progress"
        assert rig.engine.stop()
        rig.context.term()


async def test_preempted_requests_are_counted(decode: Rig, model: PretendedVllm) -> None:
    """vLLM's own series of this name is hidden, because workers of every engine have ours."""
    step = msgspec.structs.replace(model._step([], time.monotonic()), num_preempted=2)
    model.thread.loop.call_soon_threadsafe(decode.engine._on_link_event, SCHEDULER, step)
    await until(lambda: decode.metrics.registry.get_sample_value("vllm:num_preemptions_total", LABELS) == 2.0)


async def test_the_prefix_cache_is_reset_after_the_last_request(decode: Rig, model: PretendedVllm) -> None:
    model.faults.pace_s, before = PACE_S, model.num_resets
    decode.decode(num_tokens=8, prefill_worker="")
    await until(decode.deltas)
    decode.tell(ResetPrefixCache(request_id=""))
    await until(lambda: decode.engine.is_empty)
    await until(lambda: model.num_resets > before and not len(model.cached))
    assert model.num_resets <= before + 2, "vLLM was asked while the request was running"


async def test_blocks_that_vllm_does_not_free_are_owned(
    decode: Rig, model: PretendedVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "SETTLE_S", 0.1)
    decode.decode(prefill_worker="")
    await until(lambda: decode.deltas() and decode.engine.is_empty)
    await until(lambda: decode.engine._last.num_running == 0)  # the step after the last request
    last = decode.engine._last
    await until(lambda: decode.engine.status.blocks.owned == 0)
    model.event(-1, msgspec.structs.replace(last, num_free_blocks=last.num_total_blocks - 3))
    await until(lambda: decode.engine.status.blocks.owned == 3)

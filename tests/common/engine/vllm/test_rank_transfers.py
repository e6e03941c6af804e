"""Transfers between the ranks of pretended vLLM workers, over real sockets."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq

from common.engine.kv import block_ring
from common.engine.transfer.transports import nixl
from common.engine.transfer.transports.interface import PreparedBlocks
from common.engine.vllm import rank_transfers
from common.engine.vllm.layout import KVGroup, heads_of, pairs
from common.engine.vllm.link import Arrived, Cancel, Forget, RankFailed, Send, Sent, TransferLost
from common.engine.vllm.rank_transfers import Open
from common.errors import ConfigError
from common.wire import decode as decode_message
from common.wire import encode
from common.wire.messages import KVFailed, KVGrant, KVOpen, KVTarget

from ....pretended_nixl import PretendedNixl
from ....waiting import wait_until
from .rank_rig import CONTENT, FULL, LAYERS, TOKENS, WorkerRig, close, make_worker, new_model

SOURCE = (3, 5, 7, 9, 11)
TARGET = (2, 4, 6, 8, 10)
ODD = KVGroup("window", TOKENS, 6, FULL.head_bytes, window=7)


@pytest.fixture
def make() -> Iterator[Callable[..., WorkerRig]]:
    made: list[WorkerRig] = []

    def new(*args: Any, **settings: Any) -> WorkerRig:
        made.append(make_worker(*args, **settings))
        return made[-1]

    yield new
    close(made)


def send_all(prefill: WorkerRig, decode: WorkerRig, name: str = "a", num_tokens: int = 18) -> None:
    prefill.open(decode.target, name, num_tokens)
    prefill.computed([SOURCE] * len(prefill.groups), num_tokens, name)
    prefill.done(name)


def check_same(prefill: WorkerRig, decode: WorkerRig, model: Any, group: int = 0, first: int = 0) -> None:
    """The blocks of all decode ranks have the KV of the model's heads."""
    size = len(decode.ranks)
    for number, rank in enumerate(decode.ranks):
        heads = heads_of(decode.groups[group].num_heads, size, number)
        for cache, layer in zip(rank.caches[group], model[group], strict=True):
            for source, target in list(zip(SOURCE, TARGET, strict=True))[first:]:
                assert torch.equal(cache[target], layer[source, heads.start : heads.stop])


def test_kv_arrives_is_loaded_and_leaves_nothing_behind(make: Callable[..., WorkerRig]) -> None:
    model = new_model((FULL,))
    prefill, decode = make("p", model=model), make("d")
    decode.expect()
    prefill.open(decode.target)
    prefill.computed([SOURCE[:3]], 10)  # in chunks; the third block is not full yet
    prefill.computed([SOURCE], 18)
    prefill.done()
    (arrived,) = decode.wait(Arrived)
    assert isinstance(arrived, Arrived) and (arrived.done.first_token, arrived.done.request_id) == (7, "a")
    assert arrived.num_bytes == 5 * 2 * FULL.head_bytes
    (sent,) = prefill.wait(Sent)
    assert isinstance(sent, Sent) and sent.reason == "" and sent.num_bytes == arrived.num_bytes
    assert arrived.transport == sent.transport and arrived.busy_s > 0
    decode.load([TARGET])
    assert decode.wait_loaded()
    check_same(prefill, decode, model)
    prefill.finish()
    for worker in (prefill, decode):
        worker.check_empty()


def test_kv_that_comes_before_its_request_waits_for_it(make: Callable[..., WorkerRig]) -> None:
    prefill, decode = make("p"), make("d")
    send_all(prefill, decode)
    decode.expect()
    decode.wait(Arrived)


def test_cached_blocks_are_neither_sent_nor_overwritten(make: Callable[..., WorkerRig]) -> None:
    model = new_model((FULL,))
    prefill, decode = make("p", model=model), make("d")
    decode.expect(first_block=2)
    send_all(prefill, decode)
    decode.wait(Arrived)
    (sent,) = prefill.wait(Sent)
    assert isinstance(sent, Sent) and (sent.num_skipped, sent.num_bytes) == (2, 3 * 2 * FULL.head_bytes)
    decode.load([TARGET], num_cached=3 * TOKENS)  # one more block is cached by now
    assert decode.wait_loaded()
    check_same(prefill, decode, model, first=3)
    assert not any(cache[list(TARGET[:3])].any() for cache in decode.ranks[0].caches[0])


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("decode_size", [1, 2, 4])
@pytest.mark.parametrize("prefill_size", [1, 2, 4])
@pytest.mark.parametrize("num_heads", [1, 2, 8])
def test_ranks_of_any_number_exchange_heads(
    make: Callable[..., WorkerRig], num_heads: int, prefill_size: int, decode_size: int
) -> None:
    group = KVGroup("full", TOKENS, num_heads, LAYERS * TOKENS * CONTENT * 4)
    model = new_model((group,))
    prefill, decode = make("p", prefill_size, (group,), model=model), make("d", decode_size, (group,))
    decode.expect()
    send_all(prefill, decode)
    arrived = decode.wait(Arrived)
    found = pairs(num_heads, prefill_size, decode_size)
    for rank, event in enumerate(arrived):
        heads = sum(len(pair.heads) for pair in found if pair.decode == rank)
        assert event.num_bytes == 5 * heads * group.head_bytes  # type: ignore[attr-defined]
    for rank, event in enumerate(prefill.wait(Sent)):
        heads = sum(len(pair.heads) for pair in found if pair.prefill == rank)
        assert (event.reason, event.num_bytes) == ("", 5 * heads * group.head_bytes)  # type: ignore[attr-defined]
    decode.load([TARGET])
    assert decode.wait_loaded()
    check_same(prefill, decode, model)
    prefill.finish()
    for worker in (prefill, decode):
        worker.check_empty()


def test_windows_and_states_follow_full_attention(make: Callable[..., WorkerRig]) -> None:
    size = LAYERS * TOKENS * CONTENT * 4
    groups = (FULL, KVGroup("window", TOKENS, 2, size, window=7), KVGroup("state", 1024, 1, size))
    model = new_model(groups)
    prefill, decode = make("p", 1, groups, model=model), make("d", 1, groups)
    decode.expect(first_block=3)  # ignored with several groups
    prefill.open(decode.target)
    prefill.computed([SOURCE, (0, 0, 0, *SOURCE[3:]), SOURCE[-1:]], 18)
    prefill.done()
    (arrived,) = decode.wait(Arrived)
    assert arrived.num_bytes == (5 * 2 + 2 * 2 + 1) * size  # type: ignore[attr-defined]
    decode.load([TARGET, (0, 0, 0, *TARGET[3:]), TARGET[-1:]])
    assert decode.wait_loaded()
    check_same(prefill, decode, model, 0)
    check_same(prefill, decode, model, 1, first=3)
    check_same(prefill, decode, model, 2, first=4)


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("transport", ["tcp", "shm", "nixl"])
def test_every_transport_moves_blocks_of_all_sizes(
    make: Callable[..., WorkerRig],
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    prefill_size: int,
    decode_size: int,
) -> None:
    monkeypatch.setattr(nixl, "NixlAgent", lambda worker_id: PretendedNixl())
    monkeypatch.setattr(block_ring, "RING_BYTES", 0)
    monkeypatch.setattr(block_ring, "MIN_SLOTS", 2)  # each is used several times
    size = LAYERS * TOKENS * CONTENT * 4
    groups = (FULL, KVGroup("window", TOKENS, 6, size, window=7))
    model = new_model(groups)
    prefill = make("p", prefill_size, groups, model=model, kv_transport=transport)
    decode = make("d", decode_size, groups, kv_transport=transport)
    for name in "ab":
        decode.expect(name)
        prefill.open(decode.target, name)
        prefill.computed([SOURCE, SOURCE], 18, name)
        prefill.done(name)
    for number in (1, 2):
        arrived = decode.wait(Arrived, number)
        assert sum(event.num_bytes for event in arrived) == (5 * 2 + 2 * 6) * size  # type: ignore[attr-defined]
        sent = prefill.wait(Sent, number)
        assert {(event.reason, event.transport) for event in sent} == {("", transport)}  # type: ignore[attr-defined]
        assert sum(event.num_bytes for event in sent) == (5 * 2 + 2 * 6) * size  # type: ignore[attr-defined]
    for name in "ab":
        decode.load([TARGET, TARGET], name=name)
        assert decode.wait_loaded(name)
        check_same(prefill, decode, model, 0)
        check_same(prefill, decode, model, 1, first=3)
        prefill.finish(name)
    for worker in (prefill, decode):
        worker.check_empty()


def test_workers_that_cannot_share_memory_use_tcp_unless_it_is_required(make: Callable[..., WorkerRig]) -> None:
    decode = make("d", kv_transport="tcp")
    for number, transport in enumerate(("auto", "shm")):
        prefill = make(f"p{number}", kv_transport=transport)
        decode.expect(transport)
        send_all(prefill, decode, transport)
        (sent,) = prefill.wait(Sent)
        assert isinstance(sent, Sent)
        if transport == "auto":
            assert (sent.reason, sent.transport) == ("", "tcp")
        else:
            assert "--kv-transport is shm" in sent.reason
            (lost,) = decode.wait(TransferLost)
            assert "--kv-transport is shm" in lost.reason  # type: ignore[attr-defined]
        decode.order(Forget(request_id=transport, attempt=0))


def test_a_preempted_prompt_is_sent_from_its_new_blocks(make: Callable[..., WorkerRig]) -> None:
    model = new_model((FULL,))
    prefill, decode = make("p", model=model), make("d")
    prefill.open(decode.target)
    prefill.computed([(20, 21, 22)], 12)
    prefill.step(preempted=[("a", 0)])
    for layer in prefill.ranks[0].caches[0]:
        layer[20:23] = 0  # another request's
    decode.expect()
    prefill.computed([SOURCE], 18)
    prefill.done()
    decode.wait(Arrived)
    decode.load([TARGET])
    assert decode.wait_loaded()
    check_same(prefill, decode, model)


def test_a_block_that_vllm_has_released_is_never_sent(make: Callable[..., WorkerRig]) -> None:
    prefill, decode = make("p"), make("d")
    decode.expect()
    prefill.open(decode.target)
    decode.wait_announced()
    prefill.computed([(3, 0, 7, 9, 11)], 18)
    (lost,) = decode.wait(TransferLost)
    assert "vLLM released a block" in lost.reason  # type: ignore[attr-defined]


@pytest.mark.parametrize("stage", ["opened", "granted", "computed"])
def test_an_aborted_prompt_ends_on_both_sides(make: Callable[..., WorkerRig], stage: str) -> None:
    prefill, decode = make("p", 2), make("d", 1)
    if stage != "opened":
        decode.expect()
    prefill.open(decode.target)
    decode.wait_announced()
    if stage == "computed":
        prefill.computed([SOURCE], 18)
    prefill.order(Cancel(request_id="a", attempt=0, reason="the client left", phase="abort"))
    assert all("the client left" in each.reason for each in prefill.wait(Sent))  # type: ignore[attr-defined]
    if stage != "opened":
        (lost,) = decode.wait(TransferLost)
        assert (lost.phase, lost.reason) == ("abort", "the client left")  # type: ignore[attr-defined]
    prefill.finish()
    for worker in (prefill, decode):
        worker.check_empty()


def test_one_lost_rank_ends_the_others_of_the_prompt(make: Callable[..., WorkerRig]) -> None:
    prefill, decode = make("p", 2), make("d", 1)
    decode.expect()
    prefill.open(decode.target)
    decode.wait_announced()
    prefill.ranks[0].transfers.order(Cancel(request_id="a", attempt=0, reason="broken"))
    decode.wait(TransferLost)
    assert "broken" in prefill.wait(Sent)[1].reason  # type: ignore[attr-defined]


@pytest.mark.parametrize("moment", ["expected", "opened", "arrived"])
@pytest.mark.parametrize("reason", ["", "the client left"])
def test_kv_that_is_no_longer_wanted_frees_its_slots(make: Callable[..., WorkerRig], moment: str, reason: str) -> None:
    prefill, decode = make("p"), make("d")
    decode.expect()
    if moment == "expected":
        decode.order(Forget(request_id="a", attempt=0, reason=reason))
    prefill.open(decode.target)
    if moment != "expected":
        decode.wait_announced()
    prefill.computed([SOURCE[:2]], 8)
    if moment == "opened":
        decode.order(Forget(request_id="a", attempt=0, reason=reason))
    if moment == "arrived":
        prefill.computed([SOURCE], 18)
        prefill.done()
        decode.wait(Arrived)
        decode.order(Forget(request_id="a", attempt=0, reason=reason))
    (sent,) = prefill.wait(Sent)
    assert (reason if moment != "arrived" else "") in sent.reason and bool(sent.reason) == (  # type: ignore[attr-defined]
        bool(reason) and moment != "arrived"
    )
    prefill.finish()
    for worker in (prefill, decode):
        worker.check_empty()
    assert not decode.ranks[0].events_of(TransferLost)  # the worker knows


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"weights": "other"}, "differs from this worker's"),
        ({"epoch": 987654}, "boot epoch"),
        ({"groups": (KVGroup("full", TOKENS, 1, FULL.head_bytes),)}, "differs from this worker's"),
    ],
)
def test_ranks_of_another_model_or_life_are_refused(
    make: Callable[..., WorkerRig], caplog: pytest.LogCaptureFixture, change: Any, why: str
) -> None:
    prefill, decode = make("p"), make("d", **change)
    target = decode.target
    if "epoch" in change:
        target = type(target)(target.worker_id, 3, target.address)
    decode.expect()
    prefill.open(target)
    (sent,) = prefill.wait(Sent)
    assert why in sent.reason  # type: ignore[attr-defined]
    own = str(change.get("epoch", decode.ranks[0].transfers._fingerprint))
    assert own in caplog.text and own not in sent.reason, "told to a stranger"  # type: ignore[attr-defined]
    prefill.finish()
    prefill.check_empty()


def test_a_decode_worker_with_an_impossible_number_of_ranks_is_refused(make: Callable[..., WorkerRig]) -> None:
    prefill = make("p")
    prefill.open(KVTarget("d", 3, "tcp://127.0.0.1:7,8,9"))
    (sent,) = prefill.wait(Sent)
    assert "2 KV heads cannot be divided among 3 ranks" in sent.reason  # type: ignore[attr-defined]
    prefill.finish()
    prefill.check_empty()


def test_another_length_is_refused(make: Callable[..., WorkerRig]) -> None:
    prefill, decode = make("p"), make("d")
    decode.expect(num_tokens=30)
    prefill.open(decode.target)
    (lost,) = decode.wait(TransferLost)
    assert "5 blocks do not match the length of the prompt, 8 blocks" in lost.reason  # type: ignore[attr-defined]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_corrupted_block_is_found(
    make: Callable[..., WorkerRig], monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    prefill, decode = make("p", kv_transport=transport), make("d", kv_transport=transport)
    send = PreparedBlocks.try_send

    def corrupt(self: PreparedBlocks, *args: Any) -> bool:
        return send(replace(self, checksums=[0] * len(self.indices)), *args)

    monkeypatch.setattr(PreparedBlocks, "try_send", corrupt)
    decode.expect()
    send_all(prefill, decode)
    (lost,) = decode.wait(TransferLost)
    assert "corrupt" in lost.reason  # type: ignore[attr-defined]
    decode.load([TARGET])
    assert not decode.wait_loaded()  # vLLM recomputes the prompt
    prefill.finish()
    for worker in (prefill, decode):
        worker.check_empty()


def test_requests_wait_for_slots_in_turn(make: Callable[..., WorkerRig]) -> None:
    prefill, decode = make("p", 2), make("d", 2, num_slots=7, admits=False)
    for name in "abc":
        decode.expect(name)
        decode.admit(name)
    for name in "cba":  # their announcements come in any order
        send_all(prefill, decode, name)
    for count, name in enumerate("abc", 1):
        arrived = decode.wait(Arrived, count)
        assert {each.request_id for each in arrived} == {name}  # type: ignore[attr-defined]
        assert all(len(rank.events_of(Arrived)) == count for rank in decode.ranks)
        decode.load([TARGET], name=name)
        assert decode.wait_loaded(name)
    for name in "abc":
        prefill.finish(name)
    for worker in (prefill, decode):
        worker.check_empty()


@pytest.mark.parametrize("size", [1, 2])
def test_a_prompt_that_is_not_announced_keeps_no_slots(make: Callable[..., WorkerRig], size: int) -> None:
    prefill, decode = make("p", size), make("d", size, num_slots=7)
    for name in "ab":
        decode.expect(name)
    send_all(prefill, decode, "b")  # the prompt of a is still in the queue
    assert {each.request_id for each in decode.wait(Arrived)} == {"b"}  # type: ignore[attr-defined]
    for rank in decode.ranks:
        rank.transfers.expire(time.monotonic() + 29)
        assert not rank.events_of(TransferLost)


def test_ranks_that_see_announcements_in_opposite_orders_finish_all(make: Callable[..., WorkerRig]) -> None:
    prefill, decode = make("p", 2), make("d", 2, num_slots=7)  # slots for one of both prompts
    for name in "ab":
        decode.expect(name)
    for names in ("ab", "ba"):  # the first of each rank, then the second
        for rank, name in enumerate(names):
            send = Send(request_id=name, attempt=0, target=decode.target)
            prefill.ranks[rank].step(opens=[Open(f"v-{name}", send, 18)])
            transfers = decode.ranks[rank].transfers
            wait_until(lambda t=transfers, n=name: t._incoming[n, 0].pairs, "the announcement", 20)
    for name in "ab":
        prefill.computed([SOURCE], 18, name)
        prefill.done(name)
    for count, name in enumerate("ab", 1):
        assert {each.request_id for each in decode.wait(Arrived, count)} == {name}  # type: ignore[attr-defined]
        decode.load([TARGET], name=name)
        assert decode.wait_loaded(name)


def test_small_prompts_do_not_overtake_a_large_one(make: Callable[..., WorkerRig]) -> None:
    prefill, decode = make("p"), make("d", num_slots=7)
    sizes = {"first": 18, "large": 18, "small": 6}  # 5, 5 and 2 blocks
    for name, num_tokens in sizes.items():
        decode.expect(name, num_tokens)
        send_all(prefill, decode, name, num_tokens)
        wait_until(lambda n=name: decode.ranks[0].transfers._incoming[n, 0].pairs, "the announcement", 20)
    decode.wait(Arrived)
    assert decode.ranks[0].transfers.slots.num_free == 2
    decode.load([TARGET], name="first")
    arrived = decode.wait(Arrived, 3)
    assert {each.request_id for each in decode.ranks[0].events_of(Arrived)} == set(sizes) and arrived  # type: ignore[attr-defined]


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other, zmq.Context() as context:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        settings: Any = SimpleNamespace(kv_host="127.0.0.1", kv_port=port - 1)
        with pytest.raises(ConfigError, match=f"kv_port={port}: must be a port that is free on 127.0.0.1, like"):
            rank_transfers._listener(context, settings, 1, None)


def test_what_never_fits_is_refused_at_once(make: Callable[..., WorkerRig]) -> None:
    decode = make("d", num_slots=4)
    decode.expect()
    (lost,) = decode.wait(TransferLost)
    assert lost.reason == "5 blocks exceed the 4 of the staging memory"  # type: ignore[attr-defined]
    decode.check_empty()


def test_waiting_for_slots_renews_the_lease_and_ends_after_a_while(make: Callable[..., WorkerRig]) -> None:
    prefill, decode = make("p"), make("d", num_slots=7)
    for name in "ab":
        decode.expect(name)
        send_all(prefill, decode, name)
    decode.wait(Arrived)
    rank = decode.ranks[0].transfers
    wait_until(lambda: rank._incoming["b", 0].pairs, "the announcement", 20)
    now = max(pair.opened_at for pair in rank._incoming["b", 0].pairs.values())
    rank.expire(now + 29)
    assert not decode.ranks[0].events_of(TransferLost)
    rank.expire(now + 31)
    (lost,) = decode.wait(TransferLost)
    assert lost.reason == "no staging memory for 5 blocks within 30 s"  # type: ignore[attr-defined]


def test_lost_slots_end_the_engine_once_no_request_is_left(make: Callable[..., WorkerRig]) -> None:
    transfers = make("decode").ranks[0].transfers
    transfers.expire(time.monotonic())
    transfers.slots.take(2)
    with pytest.raises(RuntimeError, match="^2 staging slots belong to no request$"):
        transfers.expire(time.monotonic())
    wait_until(lambda: transfers.failure is not None, "the thread of timeouts finds them too")
    with pytest.raises(RuntimeError, match="has died"):
        transfers.check()


@pytest.mark.parametrize("name", ["receiver", "sender"])
def test_a_thread_that_dies_is_reported_though_no_step_runs(
    make: Callable[..., WorkerRig], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(rank_transfers, "TICK_S", 0.01)
    decode = make("d")
    getattr(decode.ranks[0].transfers, f"_{name}").failure = IndexError("a head without an owner")
    (failed,) = decode.wait(RankFailed)
    assert f"the KV {name} has died: IndexError: a head without an owner" in failed.reason  # type: ignore[attr-defined]


@pytest.mark.parametrize("groups", [(KVGroup("full", TOKENS, 8, FULL.head_bytes),), (FULL, ODD)], ids=["one", "two"])
def test_no_announcement_ends_a_receiver(make: Callable[..., WorkerRig], groups: tuple[KVGroup, ...]) -> None:
    decode = make("d", 1, groups)
    chosen = random.Random(0)
    transfers = decode.ranks[0].transfers
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.set(zmq.LINGER, 0)
        peer.connect(decode.target.address)
        sizes = [1, 2, 3, 5, 6, 12, 1023, 1024, 1025, 9999] * 2
        for attempt, size in enumerate(sizes):
            decode.expect(attempt=attempt)
            num_blocks = len(transfers._incoming["a", attempt].units)
            fields = {"worker_id": "p", "epoch": 1, "decode_epoch": decode.epoch, "fingerprint": transfers._fingerprint}
            for rank in chosen.sample(range(size), min(size, 3)):
                name = f"a/{rank}.{size}.{chosen.choice([0, 0, 1])}"
                message = KVOpen(request_id=name, attempt=attempt, num_blocks=num_blocks, **fields)
                peer.send(encode(message))
                assert peer.poll(5000), "no answer"
                assert isinstance(decode_message(peer.recv()), KVGrant | KVFailed)


def test_a_sender_that_stops_is_given_up(make: Callable[..., WorkerRig]) -> None:
    prefill, decode = make("p"), make("d")
    decode.expect()
    prefill.open(decode.target)
    prefill.computed([SOURCE[:2]], 8)
    wait_until(lambda: any(each.blocks for each in decode.ranks[0].transfers._incoming["a", 0].pairs.values()))
    decode.ranks[0].transfers.expire(time.monotonic() + 31)
    (lost,) = decode.wait(TransferLost)
    assert "no KV received for 30 s" in lost.reason  # type: ignore[attr-defined]
    (sent,) = prefill.wait(Sent)
    assert "no KV received" in sent.reason  # type: ignore[attr-defined]
    prefill.finish()
    for worker in (prefill, decode):
        worker.check_empty()


def test_a_decode_worker_that_is_gone_costs_a_lease(make: Callable[..., WorkerRig]) -> None:
    prefill, decode = make("p", lease_s=0.2), make("d")
    target = decode.target
    close([decode])
    decode.ranks.clear()
    prefill.open(target)
    prefill.computed([SOURCE], 18)
    prefill.done()
    (sent,) = prefill.wait(Sent)
    assert "sent nothing for 0.2 s" in sent.reason  # type: ignore[attr-defined]
    prefill.finish()
    prefill.check_empty()


def test_a_prompt_without_a_transfer_is_reported(make: Callable[..., WorkerRig]) -> None:
    prefill = make("p")
    prefill.done()
    (sent,) = prefill.wait(Sent)
    assert sent.reason == "the prompt has no KV transfer"  # type: ignore[attr-defined]


def test_a_new_attempt_replaces_the_old_one(make: Callable[..., WorkerRig]) -> None:
    prefill, decode = make("p"), make("d")
    decode.expect()
    prefill.open(decode.target)
    decode.wait_announced()
    decode.expect(attempt=1)
    (sent,) = prefill.wait(Sent)
    assert "superseded by a new attempt" in sent.reason  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(3))
def test_lives_in_any_order_leave_nothing(
    make: Callable[..., WorkerRig], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(block_ring, "RING_BYTES", 0)
    monkeypatch.setattr(block_ring, "MIN_SLOTS", 3)
    chosen = random.Random(seed)
    transport = ("auto", "auto", "tcp")[seed]
    prefill = make("p", chosen.choice([1, 2]), kv_transport=transport)
    decode = make("d", chosen.choice([1, 2]), num_slots=12, kv_transport=transport)
    target = decode.target
    names = [f"r{number}" for number in range(8)]
    opened: set[str] = set()
    loaded: set[str] = set()
    expected: set[str] = set()
    for _ in range(200):
        name = chosen.choice(names)
        time.sleep(0.002)  # the threads of both sides do something too
        match chosen.choice(("expect", "open", "compute", "compute", "preempt", "done", "cancel", "forget", "load")):
            case "expect" if name not in expected:
                expected.add(name)
                decode.expect(name, first_block=chosen.choice([0, 2]))
            case "open" if name not in opened:
                opened.add(name)
                prefill.open(target, name)
            case "compute" if name in opened:
                prefill.computed([SOURCE], chosen.choice([9, 18, 18]), name)
            case "preempt" if name in opened and chosen.random() < 0.3:
                prefill.step(preempted=[(name, 0)])
            case "done" if name in opened:
                prefill.done(name)
            case "cancel" if chosen.random() < 0.1:
                prefill.order(Cancel(request_id=name, attempt=0, reason="cancelled"))
            case "forget" if chosen.random() < 0.1:
                decode.order(Forget(request_id=name, attempt=0, reason=chosen.choice(["", "forgotten"])))
            case "load" if name not in loaded and decode.has_arrived(name):
                loaded.add(name)
                decode.load([TARGET], name=name, num_cached=2 * TOKENS)
        for worker in (prefill, decode):
            assert all(rank.transfers.check_integrity() == [] for rank in worker.ranks)
    for name in names:
        decode.order(Forget(request_id=name, attempt=0, reason="over"))
        if name in loaded:
            decode.wait_loaded(name)
    for name in opened:
        prefill.step(cancelled=[(name, 0)])
        prefill.finish(name)
    for worker in (prefill, decode):
        worker.check_empty()
    for rank in prefill.ranks:
        ended = [event.request_id for event in rank.events_of(Sent) if event.reason != "the prompt has no KV transfer"]  # type: ignore[attr-defined]
        assert sorted(ended) == sorted(opened), "each transfer has one end"

"""Two prefill engines, one of which takes cached blocks from the other: the same answers, no waits, whatever fails."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from common.engine.transfer import puller as puller_module
from common.engine.transfer.lender import LendableBlocks, LentBlock
from common.latency.step_model import StepModel
from common.wire.messages import AbortRequest, KVPeer, ResetPrefixCache

from ..engine_rig import prompt
from ..waiting import wait_until

Rig = Any  # EngineRig of conftest, which test modules cannot import
FIRST = prompt(70)
"""Of 4 full blocks."""


@pytest.fixture
def pair(make_engine: Callable[..., Rig]) -> Callable[..., tuple[Rig, Rig]]:
    """An engine that has computed FIRST, and one that has not."""

    def make(**options: Any) -> tuple[Rig, Rig]:
        holder, other = (make_engine(peers=True, name=name, **options) for name in ("holder", "other"))
        assert ask(holder, FIRST, "first") == (holder.oracle(FIRST), 0)
        return holder, other

    return make


def ask(rig: Rig, tokens: list[int], name: str, **options: Any) -> tuple[list[int], int]:
    """The first token, and how many of the prompt were cached."""
    rig.ask(tokens, name, **options)
    rig.until(lambda: rig.deltas(name))
    (delta,) = rig.deltas(name)
    return list(delta.token_ids), delta.num_cached_tokens


def peer_of(holder: Rig, num_blocks: int = 4, **fields: Any) -> KVPeer:
    return replace(holder.as_peer, num_blocks=num_blocks, **fields)


def outcomes(rig: Rig) -> dict[str, float]:
    counter = rig.engine.metrics._pulls
    return {s.labels["outcome"]: s.value for m in counter.collect() for s in m.samples if s.name.endswith("_total")}


def pulled_tokens(rig: Rig) -> float:
    hits = rig.engine.metrics._tier_hits
    found = [s for m in hits.collect() for s in m.samples if s.name.endswith("_total") and s.labels["tier"] == "peer"]
    return sum(sample.value for sample in found)


@pytest.mark.parametrize("share", [True, False])
def test_a_prefix_is_pulled_and_answers_the_same(pair: Callable[..., Any], share: bool) -> None:
    holder, other = pair(share=share)
    assert ask(other, FIRST, "a", peer=peer_of(holder)) == (other.oracle(FIRST), 64)
    assert outcomes(other) == {"pulled": 1.0} and pulled_tokens(other) == 64
    other.until(lambda: other.is_clean)
    assert ask(other, FIRST, "again") == (other.oracle(FIRST), 64)  # from its own memory by now
    longer = [*FIRST[:64], *prompt(40, 2)]
    assert ask(holder, longer, "longer")[1] == 64  # what was lent is as it was
    other.until(lambda: other.is_clean)
    holder.until(lambda: holder.is_clean)


def test_a_long_prefix_takes_many_messages(pair: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.engine.transfer.frames.FRAME_TARGET_BYTES", 1)  # a block a message
    holder, other = pair(share=False)
    tokens = prompt(400, 5)
    assert ask(holder, tokens, "long")[1] == 0
    assert ask(other, tokens, "long", peer=peer_of(holder, 24)) == (other.oracle(tokens), 384)
    assert holder.lender.num_lent_blocks == 24


def test_what_was_pulled_is_shipped_like_what_was_computed(pair: Callable[..., Any]) -> None:
    holder, other = pair()
    other.ask(FIRST, "a", remote=True, peer=peer_of(holder))
    other.until(lambda: other.router.poll(0))
    assert other.read_open().num_blocks == 5
    other.grant("a", first_block=5)
    other.until(lambda: outcomes(other))
    other.ack("a")
    other.until(lambda: other.is_clean)
    assert outcomes(other) == {"pulled": 1.0}


def test_blocks_below_the_memory_of_a_peer_are_pulled(make_engine: Callable[..., Rig], tmp_path: Path) -> None:
    holder = make_engine(peers=True, name="holder", disk=tmp_path / "blocks", num_blocks=10)
    other = make_engine(peers=True, name="other")
    ask(holder, FIRST, "first")
    wait_until(lambda: holder.tiers.counts[0].num_blocks == 4)
    ask(holder, prompt(160, 1), "others")
    assert holder.engine.scheduler.pool.match(holder.hashes(FIRST)) == []
    assert ask(other, FIRST, "a", peer=peer_of(holder)) == (other.oracle(FIRST), 64)


def test_what_a_peer_lost_is_computed(pair: Callable[..., Any]) -> None:
    holder, other = pair()
    longer = [*FIRST[:64], *prompt(64, 6)]
    assert ask(other, longer, "a", peer=peer_of(holder, 7)) == (other.oracle(longer), 64)
    holder.tell(ResetPrefixCache(request_id="reset"))
    holder.turn()
    new = [*prompt(16, 8), *FIRST]
    assert ask(other, new, "b", peer=peer_of(holder)) == (other.oracle(new), 0)
    assert outcomes(other) == {"missing": 2.0}


@pytest.mark.parametrize("fields", [{"epoch": 6}, {"worker_id": "someone"}])
def test_another_worker_at_the_address_lends_nothing(pair: Callable[..., Any], fields: dict[str, Any]) -> None:
    holder, other = pair()
    assert ask(other, FIRST, "a", peer=peer_of(holder, **fields)) == (other.oracle(FIRST), 0)
    assert outcomes(other) == {"missing": 1.0}


def test_a_layout_of_another_kind_lends_nothing(pair: Callable[..., Any]) -> None:
    holder, other = pair()
    other.puller._fingerprint = "another"
    assert ask(other, FIRST, "a", peer=peer_of(holder)) == (other.oracle(FIRST), 0)


def test_nothing_is_pulled_in_frames_where_a_transport_is_required(
    pair: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    holder, other = pair(share=False)
    other.puller._required = "teleport"
    with caplog.at_level("INFO"):
        assert ask(other, FIRST, "a", peer=peer_of(holder)) == (other.oracle(FIRST), 0)
    assert "the memory of holder is not readable, and --kv-transport is teleport" in caplog.text


@pytest.mark.parametrize("share", [True, False])
def test_blocks_that_change_while_they_travel_are_computed(pair: Callable[..., Any], share: bool) -> None:
    """As when they are evicted and written to behind their checksum."""
    holder, other = pair(share=share)
    lendable: LendableBlocks = holder.lender._blocks
    third = holder.engine.scheduler.pool.match(holder.hashes(FIRST))[2]

    def is_unchanged(block: LentBlock) -> bool:
        if block.source == third:
            holder.kv.block(third)[0] ^= 1
        return True

    lendable.is_unchanged = is_unchanged  # type: ignore[method-assign]
    assert ask(other, FIRST, "a", peer=peer_of(holder)) == (other.oracle(FIRST), 32)
    assert outcomes(other) == {"missing": 1.0}


def test_blocks_that_are_evicted_under_the_checksum_are_not_sent(pair: Callable[..., Any]) -> None:
    holder, other = pair()
    holder.lender._blocks.is_unchanged = lambda block: False
    assert ask(other, FIRST, "a", peer=peer_of(holder)) == (other.oracle(FIRST), 0)
    assert holder.lender.num_lent_blocks == 0


@pytest.fixture
def silent() -> Iterator[KVPeer]:
    """Takes connections and says nothing, as a frozen process does."""
    with closing(socket.socket()) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield KVPeer("silent", 5, f"tcp://127.0.0.1:{listening.getsockname()[1]}", 4)


def test_a_silent_peer_costs_what_computing_takes_once(
    pair: Callable[..., Any], silent: KVPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.engine.sequences.restores.MOST_WAIT_S", 0.2)
    _, other = pair()
    began = time.monotonic()
    assert ask(other, FIRST, "a", peer=silent) == (other.oracle(FIRST), 0)
    assert time.monotonic() - began > 0.05
    wait_until(lambda: not other.puller._pulls)
    assert ask(other, prompt(70, 4), "b", peer=silent)[1] == 0
    assert outcomes(other) == {"late": 1.0, "refused": 1.0}
    other.until(lambda: other.is_clean)


def test_a_dead_peer_is_no_peer(pair: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.engine.sequences.restores.MOST_WAIT_S", 0.2)
    holder, other = pair()
    holder.lender.stop()
    assert ask(other, FIRST, "a", peer=peer_of(holder)) == (other.oracle(FIRST), 0)
    other.until(lambda: other.is_clean)


@pytest.mark.parametrize("end", ["abort", "reset"])
def test_a_prompt_may_end_while_it_is_pulled(
    pair: Callable[..., Any], silent: KVPeer, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr("common.engine.sequences.restores.MOST_WAIT_S", 60.0)
    _, other = pair()
    other.ask(FIRST, "a", peer=silent)
    other.until(lambda: other.puller._pulls)
    assert not other.engine.has_work
    own = prompt(20, 3)
    assert ask(other, own, "own") == (other.oracle(own), 0)  # others are computed meanwhile
    other.tell(AbortRequest(request_id="a", attempt=0) if end == "abort" else ResetPrefixCache(request_id="reset"))
    other.until(lambda: other.is_clean)
    wait_until(lambda: not other.puller._pulls)
    assert (end == "reset") == bool(other.deltas("a"))


def test_pulls_are_bounded_on_both_sides(
    pair: Callable[..., Any], silent: KVPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.engine.sequences.restores.MOST_WAIT_S", 60.0)
    monkeypatch.setattr(puller_module, "MAX_PULLS", 1)
    holder, other = pair()
    other.ask(prompt(70, 4), "held", peer=silent)
    other.until(lambda: other.puller._pulls)
    assert ask(other, FIRST, "a", peer=peer_of(holder)) == (other.oracle(FIRST), 0)
    assert outcomes(other) == {"refused": 1.0}
    other.tell(AbortRequest(request_id="held", attempt=0))
    other.until(lambda: other.is_clean)
    wait_until(lambda: not other.puller._pulls)
    monkeypatch.setattr("common.engine.transfer.lender.MAX_LENT", 0)
    other.tell(ResetPrefixCache(request_id="reset"))
    assert ask(other, FIRST, "b", peer=peer_of(holder)) == (other.oracle(FIRST), 0)
    assert outcomes(other)["missing"] == 1.0


def test_computing_is_not_replaced_by_what_is_slower(pair: Callable[..., Any]) -> None:
    holder, other = pair()
    other.engine.step_fit.model = StepModel(token_s=1e-5, num_steps=9)
    assert ask(other, FIRST, "a", peer=peer_of(holder)) == (other.oracle(FIRST), 0)
    assert outcomes(other) == {"slower": 1.0}


def test_late_frames_are_dropped(pair: Callable[..., Any]) -> None:
    """Of a pull that ended: what comes for it must not count for the next one of the same request."""
    holder, other = pair(share=False)
    send = holder.lender._send_blocks

    def twice(*arguments: Any, **options: Any) -> None:
        send(*arguments, **options)
        send(*arguments, **options)

    holder.lender._send_blocks = twice
    assert ask(other, FIRST, "a", peer=peer_of(holder)) == (other.oracle(FIRST), 64)
    longer = [*FIRST, *prompt(30, 9)]
    assert ask(holder, longer, "longer")[1] == 64
    other.tell(ResetPrefixCache(request_id="reset"))
    tokens, num_cached = ask(other, longer, "a2", peer=peer_of(holder, 6))
    assert tokens == other.oracle(longer) and num_cached in (64, 96)
    other.until(lambda: other.is_clean)

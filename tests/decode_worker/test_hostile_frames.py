"""A stranger at the KV socket of a decode worker: whatever it sends, the transfer beside it arrives as it should."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.engine.kv.checksums import checksum
from common.wire.messages import DecodeRequest, HandOver, KVBlocks, KVDone, KVFailed, Message

from ..common.engine.transfer.receiver_rig import Peer
from ..engine_rig import prompt
from ..hostile import forged, garbage
from .conftest import EngineRig as Rig

TOKENS = prompt(40)
TO_DECODE = ("KVOpen", "KVBlocks", "KVDone", "KVFailed")


def heard(engine: Rig, stranger: Peer) -> None:
    """Wait until the engine has processed everything that `stranger` sent."""
    stranger.open("sync", decode_epoch=1)
    while True:
        engine.until(lambda: stranger.socket.poll(0))
        message = stranger.read()
        if isinstance(message, KVFailed) and message.request_id == "sync":
            return


def finishes(engine: Rig, first: int) -> None:
    """The honest transfer goes on and the answer is that of an undisturbed run."""
    engine.ship(TOKENS, first)
    engine.until(engine.reason)
    assert engine.tokens() == engine.oracle(TOKENS)
    engine.until(lambda: engine.is_clean)


@pytest.fixture
def stranger(engine: Rig) -> Peer:
    return engine.another_peer()


def test_forged_messages_about_a_transfer_change_nothing(engine: Rig, stranger: Peer) -> None:
    engine.ask(TOKENS, remote=True)
    first = engine.granted(TOKENS)
    for message in forged("a"):
        stranger.send(message)
    heard(engine, stranger)
    assert not engine.failures() and engine.receiver.num_dropped_frames >= len(forged("a")) - len(TO_DECODE)
    finishes(engine, first)


def test_forged_messages_before_the_transfer_change_nothing(engine: Rig, stranger: Peer) -> None:
    for message in forged("a"):
        stranger.send(message)
    heard(engine, stranger)
    engine.ask(TOKENS, remote=True)
    finishes(engine, engine.granted(TOKENS))


@pytest.mark.slow
def test_garbage_is_counted_and_changes_nothing(engine: Rig, stranger: Peer) -> None:
    engine.ask(TOKENS, remote=True)
    first = engine.granted(TOKENS)
    parts = list(garbage("a"))
    for frames in parts:
        stranger.send(frames[0], *frames[1:])
    heard(engine, stranger)
    assert not engine.failures() and engine.receiver.num_dropped_frames > len(parts) / 2
    finishes(engine, first)


@pytest.mark.parametrize("token", [0, 1, 2**62])
def test_blocks_of_whom_nothing_was_granted_to_do_not_land(engine: Rig, stranger: Peer, token: int) -> None:
    """Whole, with right checksums, and for the right blocks: only the grant's token is missing."""
    engine.ask(TOKENS, remote=True)
    first = engine.granted(TOKENS)
    poison = b"\x7f" * engine.kv.block_bytes
    sums = (checksum(memoryview(poison)),) * 3
    stranger.send(KVBlocks(request_id="a", attempt=0, first_block=0, checksums=sums, token=token), *[poison] * 3)
    stranger.send(KVDone(request_id="a", attempt=0, first_token=3, token=token))
    heard(engine, stranger)
    assert not engine.receiver._transfers["a", 0].received
    finishes(engine, first)


def test_blocks_of_an_earlier_grant_do_not_land(engine: Rig) -> None:
    """The same request, granted anew: what comes with the token of the grant before is late."""
    engine.ask(TOKENS, remote=True)
    engine.granted(TOKENS)
    old = dict(engine.peer.tokens)
    engine.ask(TOKENS, attempt=1, remote=True)
    engine.until(lambda: engine.peer.socket.poll(0))
    assert isinstance(engine.peer.read(), KVFailed)  # superseded
    first = engine.granted(TOKENS, attempt=1)
    assert engine.peer.tokens["a", 1] != old["a", 0]
    fresh, engine.peer.tokens["a", 1] = engine.peer.tokens["a", 1], old["a", 0]
    engine.peer.ship(first, 3, attempt=1, frames=[b"\x7f" * engine.kv.block_bytes] * 3)
    engine.peer.tokens["a", 1] = fresh
    engine.ship(TOKENS, first, attempt=1)
    engine.until(lambda: engine.reason(attempt=1))
    assert engine.tokens(attempt=1) == engine.oracle(TOKENS)
    engine.until(lambda: engine.is_clean)


def test_another_worker_than_the_expected_one_is_refused(engine: Rig, stranger: Peer) -> None:
    engine.ask(TOKENS, remote=True)
    stranger.open("a", 3, worker_id="mallory")
    engine.until(lambda: stranger.socket.poll(0))
    refused = stranger.read()
    assert isinstance(refused, KVFailed) and "not from mallory" in refused.reason
    finishes(engine, engine.granted(TOKENS))


@pytest.mark.parametrize("router", [b"mallory", b""])
def test_another_router_cannot_touch_a_request(engine: Rig, router: bytes) -> None:
    engine.ask(TOKENS)
    engine.turn(3)
    for message in forged("a"):
        engine.tell(message, router)
    engine.until(engine.reason)
    assert engine.tokens() == engine.oracle(TOKENS)
    assert not [failed for to, failed in engine.sent if to != router and type(failed).__name__ == "RequestFailed"]
    engine.until(lambda: engine.is_clean)


def test_its_own_router_can_send_nonsense_and_only_harms_itself(engine: Rig) -> None:
    engine.ask(TOKENS, "honest")
    for message in forged("other"):
        engine.tell(message)
    engine.until(lambda: engine.reason("honest"))
    assert engine.tokens("honest") == engine.oracle(TOKENS)
    engine.until(lambda: engine.is_clean)


@pytest.mark.slow
def test_offers_of_memory_that_is_none_are_bounded(make_engine: Callable[..., Rig]) -> None:
    engine = make_engine()
    stranger = engine.another_peer()
    opens = [message for message in forged("a") if type(message).__name__ == "KVOpen"]
    for number in range(600):
        for message in opens:
            stranger.send(_renamed(message, f"mallory-{number}"))
    heard(engine, stranger)
    assert len(engine.receiver._memories._known) <= 256


def _renamed(message: Message, worker_id: str) -> Message:
    from msgspec.structs import replace

    assert not isinstance(message, DecodeRequest | HandOver)
    return replace(message, worker_id=worker_id)

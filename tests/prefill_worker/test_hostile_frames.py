"""Strangers at a KV sender: decode workers that answer for others, and routers that send it to what is no address."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import zmq

from common.wire.codec import encode
from common.wire.curve import Curve, KeyPair
from common.wire.message_fields import pack_tokens
from common.wire.messages import KVBlocks, KVDone, KVGrant, KVTarget, Message, PrefillRequest
from common.wire.sampling_params import SamplingParams

from ..common.engine.transfer.sender_rig import DecodeSide
from ..common.engine.transfer.sender_rig import SenderRig as Rig
from ..engine_rig import prompt
from ..hostile import forged, garbage
from .conftest import EngineRig as Engine


@pytest.fixture
def rig(make_sender_rig: Callable[..., Rig]) -> Rig:
    return make_sender_rig()


@pytest.fixture
def stranger() -> Iterator[DecodeSide]:
    side = DecodeSide()
    yield side
    side.router.close()
    side.context.term()


def ships(rig: Rig) -> None:
    """The transfer of four blocks goes on to its honest end."""
    rig.grant()
    message, frames = rig.read()
    assert isinstance(message, KVBlocks) and [bytes(view) for view in rig.memory[:4]] == frames
    rig.finish()
    assert isinstance(rig.read()[0], KVDone)
    rig.ack()
    rig.wait(lambda: [ended for ended in rig.ended if ended.request_id == "a" and not ended.reason])


def test_another_decode_worker_cannot_answer_for_this_one(rig: Rig, stranger: DecodeSide) -> None:
    rig.open(num_ready=4)
    rig.read_open()
    rig.sender.open("b", 0, stranger.target, [0], 1)
    stranger.read_open()
    for message in forged("a"):
        stranger.reply(message)
    rig.wait(lambda: rig.sender.num_dropped_frames == len(forged("a")))
    assert not rig.ended
    ships(rig)


def test_garbage_is_counted_and_changes_nothing(rig: Rig) -> None:
    rig.open(num_ready=4)
    rig.read_open()
    replies = [parts for parts in garbage("a") if sum(map(len, parts)) < 60_000]
    for parts in replies:
        rig.router.send_multipart([rig.peer, *parts])
    rig.wait(lambda: rig.sender.num_dropped_frames > len(replies) / 2)
    ships(rig)


def test_only_what_was_granted_carries_its_token(rig: Rig) -> None:
    rig.open(num_ready=4)
    rig.read_open()
    rig.reply(KVGrant(request_id="a", attempt=0, first_block=0, token=77))
    blocks, _ = rig.read()
    rig.finish()
    done, _ = rig.read()
    assert isinstance(blocks, KVBlocks) and isinstance(done, KVDone) and blocks.token == done.token == 77


@pytest.mark.parametrize("address", ["tcp://nonsense", "nonsense", ""])
def test_an_address_that_is_none_fails_that_transfer_only(rig: Rig, address: str) -> None:
    rig.sender.open("b", 0, KVTarget("d", 7, address), [0], 1)
    rig.wait(lambda: rig.ended)
    assert rig.ended.pop().reason.startswith("cannot connect to decode worker d")
    rig.open(num_ready=4)
    rig.read_open()
    ships(rig)


@pytest.mark.slow
def test_more_targets_than_sockets_fail_and_the_rest_goes_on(rig: Rig) -> None:
    rig.open(num_ready=4)
    rig.read_open()
    for number in range(rig.context.get(zmq.MAX_SOCKETS) // 2):  # a connection takes more than one
        rig.sender.open(f"b{number}", 0, KVTarget("d", 7, f"tcp://127.0.0.1:{number + 1}"), [0], 1)
    rig.wait(lambda: rig.ended)
    assert "cannot connect" in rig.ended[0].reason
    ships(rig)


@pytest.mark.slow
@pytest.mark.parametrize("keys", ["none", "another"])
def test_a_decode_worker_that_takes_no_connection_fails_its_transfers_soon(
    make_sender_rig: Callable[..., Rig], keys: str
) -> None:
    """It wants CURVE; the lease would hold the blocks for 30 s."""
    rig = make_sender_rig()
    router = rig.context.socket(zmq.ROUTER)
    Curve(KeyPair.generate()).serve(router)
    router.bind("tcp://127.0.0.1:*")
    if keys == "another":
        rig.sender._curve = Curve(KeyPair.generate())
    rig.sender.open("b", 0, KVTarget("d", 7, router.get_string(zmq.LAST_ENDPOINT)), [0], 1)
    rig.wait(lambda: rig.ended)
    assert "decode worker d rejects connections" in rig.ended.pop().reason
    router.close(linger=0)
    rig.sender._curve = None
    rig.open(num_ready=4)
    rig.read_open()
    ships(rig)


def test_another_router_cannot_touch_a_prompt(engine: Engine) -> None:
    tokens = prompt(100)
    engine.ask(tokens, remote=True)
    engine.turn()
    for message in forged("a"):
        engine.tell(message, b"mallory")
    message: Message = engine.read_open()
    engine.grant()
    while not isinstance(message, KVDone):
        engine.until(lambda: engine.router.poll(0))
        message, _ = engine.read()
    assert message.first_token == engine.oracle(tokens)[0]
    engine.ack()
    engine.until(lambda: engine.is_clean)
    assert {delta.token_ids for delta in engine.deltas()} == {tuple(engine.oracle(tokens))}


def test_a_router_that_sends_it_nowhere_fails_its_own_request(engine: Engine) -> None:
    request = PrefillRequest(
        request_id="b", attempt=0, prompt=pack_tokens(prompt(20)), params=SamplingParams(max_tokens=8),
        decode=KVTarget("d", 7, "tcp://nonsense"),
    )  # fmt: skip
    engine.tell(request)
    engine.ask(prompt(30), "honest")
    engine.until(lambda: engine.deltas("honest") and engine.failures("b"))
    assert "cannot connect" in engine.failures("b")[0].message
    engine.until(lambda: engine.is_clean)


def test_addresses_of_this_process_are_no_message() -> None:
    from common.errors import WireError
    from common.wire.codec import decode

    for address in ("inproc://kv-sender", "ipc:///run/x", "tcp://", "udp://1.2.3.4:5", "tcp://a b:1"):
        request = PrefillRequest(
            request_id="b", attempt=0, prompt=b"1234", params=SamplingParams(max_tokens=8),
            decode=KVTarget("d", 7, address),
        )  # fmt: skip
        with pytest.raises(WireError, match="regex"):
            decode(encode(request))

"""Strangers at a control socket, from raw bytes to well-formed lies: they are counted, and routers are served."""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import zmq

from common.engine.worker.control import MAX_ROUTERS, bind_control
from common.wire.codec import encode
from common.wire.curve import Curve, KeyPair
from common.wire.gatekeeper import Gatekeeper
from common.wire.messages import AbortRequest, BlockSnapshotRequest, RouterHeartbeat, RouterHello, ToWorker

from ....hostile import forged, garbage
from .test_control import ABORT, Rig

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"%s" + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
Dial = Callable[[Rig, bytes], socket.socket]
ZMTP_1 = [b"\x01\x00", b"\x01\x00\x09\x01" + bytes(8)]  # without a version: an empty identity, then frames


def greeting(mechanism: bytes) -> bytes:
    return GREETING % mechanism.ljust(20, b"\0")


def port_of(rig: Rig) -> int:
    return int(rig.address.rpartition(":")[2])


@pytest.fixture
def dial() -> Iterator[Dial]:
    """Makes plain TCP connections that say some bytes."""
    connections: list[socket.socket] = []

    def connect(rig: Rig, data: bytes = b"") -> socket.socket:
        connections.append(socket.create_connection(("127.0.0.1", port_of(rig)), timeout=60))
        connections[-1].sendall(data)
        return connections[-1]

    yield connect
    for connection in connections:
        connection.close()


def until_ready(connection: socket.socket) -> None:
    """Read until the other side has taken our handshake. Fails the test after the socket's timeout."""
    heard = b""
    while b"READY" not in heard:
        heard += (more := connection.recv(65536))
        assert more, "the other side hung up"


def is_cut(connection: socket.socket) -> bool:
    """Read until the other side closes. Fails the test after the socket's timeout."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        return True
    return True


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.close()


@pytest.fixture
async def impatient(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    """Cuts off who has not said who it is within a fraction of a second."""
    monkeypatch.setattr("common.wire.sockets.HANDSHAKE_MS", 300)
    rig = Rig()
    yield rig
    await rig.close()


async def serves(rig: Rig, name: str = "honest") -> None:
    """A router's greeting and request get through."""
    router = rig.router(name)
    await router.hello()
    await router.read_hello()
    await router.send(AbortRequest(request_id=name, attempt=0))
    await rig.wait(lambda: (name.encode(), AbortRequest(request_id=name, attempt=0)) in rig.received)


async def test_forged_messages_before_and_after_a_greeting(rig: Rig) -> None:
    stranger, greeted = rig.router("mallory"), rig.router("greeted")
    messages = forged("a")
    for message in messages:
        await stranger.send(message)
    await rig.wait(lambda: rig.server.num_dropped_frames == len(messages))
    assert not rig.received
    await greeted.hello()
    for message in messages:
        await greeted.send(message)
    orders = [message for message in messages if isinstance(message, ToWorker)]
    await rig.wait(lambda: rig.server.num_dropped_frames == 2 * len(messages) - len(orders))
    for_the_engine = [m for m in orders if not isinstance(m, RouterHeartbeat | BlockSnapshotRequest)]
    assert [message for _, message in rig.received] == for_the_engine
    await serves(rig)


async def test_garbage_is_counted(rig: Rig) -> None:
    stranger = rig.router("mallory")
    await stranger.hello()
    num_sent = 0
    for parts in garbage("a"):
        await stranger.send(parts[0], *parts[1:])
        num_sent += 1
    await rig.wait(lambda: rig.server.num_dropped_frames > num_sent / 2)
    await serves(rig)


async def test_a_flood_of_names_is_bounded(rig: Rig) -> None:
    await serves(rig)
    before = rig.server.num_dropped_frames
    for number in range(MAX_ROUTERS + 100):
        name = f"mallory-{number}"
        rig.server._take([name.encode(), encode(RouterHello(router_id=name, epoch=1))], time.monotonic())
    assert rig.server.num_routers == MAX_ROUTERS and rig.server.num_dropped_frames == before + 101
    await rig.routers[0].send(ABORT)
    await rig.wait(lambda: (b"honest", ABORT) in rig.received)


async def test_a_frame_larger_than_any_message_ends_its_connection(rig: Rig, dial: Dial) -> None:
    for size in (2**25 + 1, 2**63 - 1, 2**64 - 1):
        connection = dial(rig, greeting(b"NULL") + READY)
        await asyncio.to_thread(until_ready, connection)
        connection.sendall(b"\x02" + struct.pack(">Q", size) + b"x" * 1000)
        assert await asyncio.to_thread(is_cut, connection)
    await serves(rig)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="silence", marks=pytest.mark.slow),
        pytest.param(b"\xff", id="one byte", marks=pytest.mark.slow),
        pytest.param(greeting(b"NULL")[:40], id="half a greeting", marks=pytest.mark.slow),
        pytest.param(greeting(b"NULL"), id="no READY"),
        pytest.param(greeting(b"NULL") + READY[:10], id="half a READY"),
        pytest.param(greeting(b"GSSAPI"), id="another mechanism"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", id="HTTP"),
        pytest.param(bytes(range(256)) * 64, id="noise"),
    ],
)
async def test_handshakes_that_never_end_are_cut_off(impatient: Rig, dial: Dial, data: bytes) -> None:
    """Some look like ZeroMQ of 2010, which says nothing of itself: they are let in, and what they say is no message."""
    connections = [dial(impatient, data) for _ in range(100)]
    await serves(impatient, "meanwhile")
    if not data.startswith((b"GET", b"\0")):
        for connection in connections:
            assert await asyncio.to_thread(is_cut, connection)
    await serves(impatient, "after")


class CurveRig(Rig):
    """As in life with --curve-key: its routers are plain."""

    def __init__(self) -> None:
        self.gatekeeper: Gatekeeper | None = None

        def bind_with_keys(context: zmq.asyncio.Context, host: str, port: int) -> tuple[zmq.asyncio.Socket, str]:
            curve = Curve(KeyPair.generate())
            self.gatekeeper = Gatekeeper(zmq.Context.shadow(context), curve)
            self.gatekeeper.start()
            return bind_control(context, host, port, curve)

        from . import test_control

        patch = pytest.MonkeyPatch()
        with patch.context() as scope:
            scope.setattr(test_control, "bind_control", bind_with_keys)
            super().__init__()

    async def close(self) -> None:
        if self.gatekeeper is not None:
            await asyncio.to_thread(self.gatekeeper.stop)
        await super().close()


async def test_with_keys_nothing_plain_comes_in(dial: Dial) -> None:
    rig = CurveRig()
    hello = encode(RouterHello(router_id="mallory", epoch=1))
    frame = b"\x00" + bytes([len(hello)]) + hello
    old_frame = bytes([len(hello) + 1, 0]) + hello
    openings = (
        greeting(b"NULL") + READY + frame,
        greeting(b"PLAIN") + b"\x04\x0a\x05HELLO\x01a\x01b" + frame,
        greeting(b"CURVE") + READY + frame,
        *(old + old_frame * 3 for old in ZMTP_1),
    )
    connections = [dial(rig, data) for data in openings]
    plain = rig.router("plain")
    for connection in connections:
        assert await asyncio.to_thread(is_cut, connection)
    assert rig.server.num_routers == 0 and rig.server.num_dropped_frames == 0 and not rig.received
    assert not await plain.socket.poll(0)
    await rig.close()


async def test_the_same_bytes_come_in_without_keys(rig: Rig, dial: Dial) -> None:
    """What the test above sends is not refused for its own faults."""
    hello = encode(RouterHello(router_id="mallory", epoch=1))
    connection = dial(rig, greeting(b"NULL") + READY)
    await asyncio.to_thread(until_ready, connection)
    connection.sendall(b"\x00" + bytes([len(hello)]) + hello)
    await rig.wait(lambda: rig.server.num_routers == 1)


def test_every_forged_message_is_different() -> None:
    assert len({encode(message) for message in forged("a")}) == len(forged("a"))
    assert all(a != b for a, b in itertools.pairwise(garbage("a")))

"""A worker's control socket, with routers that the test plays over real sockets."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable

import pytest
import zmq
import zmq.asyncio

from common.engine.kv.block_log import BlockLog
from common.engine.worker.control import ControlServer, bind_control
from common.wire.codec import MAX_MESSAGES_PER_TURN, decode, encode
from common.wire.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    AbortRequest,
    AnyMessage,
    BlockEvents,
    BlockSnapshot,
    BlockSnapshotRequest,
    HandOver,
    KVTarget,
    Message,
    RouterHeartbeat,
    RouterHello,
    WorkerHeartbeat,
    WorkerHello,
)

from ....fake_worker import heartbeat_of, hello_of

ABORT = AbortRequest(request_id="a", attempt=0)
WAIT_S = 60.0


class Router:
    """A router's socket, with a fixed identity as real ones have."""

    def __init__(self, context: zmq.asyncio.Context, address: str, name: str) -> None:
        self.name = name
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.ROUTING_ID, name.encode())
        self.socket.connect(address)

    async def send(self, message: Message | bytes, *more: bytes) -> None:
        await self.socket.send_multipart([encode(message) if isinstance(message, Message) else message, *more])

    async def hello(
        self, epoch: int = 1, oldest: int = OLDEST_PROTOCOL_VERSION, newest: int = PROTOCOL_VERSION
    ) -> None:
        await self.send(RouterHello(router_id=self.name, epoch=epoch, oldest_protocol=oldest, protocol=newest))

    async def read(self) -> AnyMessage:
        async with asyncio.timeout(WAIT_S):
            return decode(await self.socket.recv())

    async def read_hello(self) -> WorkerHello:
        while True:
            if isinstance(message := await self.read(), WorkerHello):
                return message


class Rig:
    """A served control socket; `received` and `lost` are what it reported."""

    def __init__(self, *, router_timeout_s: float = 60.0, heartbeat_s: float = 0.01) -> None:
        self.context = zmq.asyncio.Context()
        self.socket, self.address = bind_control(self.context, "127.0.0.1", 0)
        self.received: list[tuple[bytes, AnyMessage]] = []
        self.lost: list[bytes] = []
        self.steps = itertools.count()
        self.blocks = BlockLog(epoch=3)
        self.server = ControlServer(
            self.socket,
            self.worker_hello,
            self.worker_heartbeat,
            lambda router, message: self.received.append((router, message)),
            self.lost.append,
            heartbeat_s=heartbeat_s,
            router_timeout_s=router_timeout_s,
            blocks=lambda: self.blocks,
        )
        self.serving = asyncio.create_task(self.server.run())
        self.routers: list[Router] = []

    def worker_hello(self) -> WorkerHello:
        return hello_of(epoch=3)

    def worker_heartbeat(self, router: bytes) -> WorkerHeartbeat:
        return heartbeat_of(epoch=3, step=next(self.steps), block_sequence=self.blocks.sequence)

    def router(self, name: str = "r") -> Router:
        self.routers.append(Router(self.context, self.address, name))
        return self.routers[-1]

    async def wait(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, "the condition did not come true"
            assert not self.serving.done(), "the server ended"
            await asyncio.sleep(0.002)

    async def close(self) -> None:
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)
        self.socket.close()
        for router in self.routers:
            router.socket.close()
        self.context.term()


@pytest.fixture
async def make_rig() -> AsyncIterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**options: float) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for rig in rigs:
        await rig.close()


@pytest.fixture
async def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


async def test_a_hello_is_answered_with_hello_and_then_heartbeats(rig: Rig) -> None:
    router = rig.router()
    await router.hello()
    assert await router.read() == rig.worker_hello()
    steps = [message.step for _ in range(4) if isinstance(message := await router.read(), WorkerHeartbeat)]
    assert len(steps) == 4 and steps == sorted(steps)


async def test_messages_carry_who_sent_them(rig: Rig) -> None:
    for name in ("r1", "r2"):
        router = rig.router(name)
        await router.hello()
        await router.send(ABORT)
    await rig.wait(lambda: len(rig.received) == 2)
    assert set(rig.received) == {(b"r1", ABORT), (b"r2", ABORT)}


async def test_heartbeats_are_not_handed_on(rig: Rig) -> None:
    router = rig.router()
    await router.hello()
    await router.send(RouterHeartbeat(router_id="r"))
    await router.send(ABORT)
    await rig.wait(lambda: rig.received)
    assert rig.received == [(b"r", ABORT)]


async def test_nothing_is_taken_before_a_hello(rig: Rig) -> None:
    router = rig.router()
    await router.send(ABORT)
    await router.send(RouterHeartbeat(router_id="r"))
    await rig.wait(lambda: rig.server.num_dropped_frames == 2)
    assert not rig.received and rig.server.num_routers == 0


@pytest.mark.parametrize("parts", [[b""], [b"\xc1"], [b"\x91" * 9999], [encode(ABORT), b"more"], [b""] * 50])
async def test_malformed_frames_are_dropped_and_nothing_else_happens(rig: Rig, parts: list[bytes]) -> None:
    router = rig.router()
    await router.hello()
    await router.send(parts[0], *parts[1:])
    await router.send(ABORT)
    await rig.wait(lambda: rig.received)
    assert rig.received == [(b"r", ABORT)] and rig.server.num_dropped_frames == 1


async def test_a_backlog_is_a_line_not_a_flood(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    router = rig.router()
    for _ in range(300):
        await router.send(ABORT)  # what a frozen worker finds when it thaws: its router is forgotten
    await rig.wait(lambda: rig.server.num_dropped_frames == 300)
    assert len([line for line in caplog.messages if "dropped" in line]) <= 3


async def test_a_backlog_does_not_hold_up_the_heartbeats(rig: Rig) -> None:
    router = rig.router()
    await router.hello()
    await router.read_hello()
    turn, deadline = 0, time.monotonic() + WAIT_S
    seen: list[int] = []
    rig.server._on_message = lambda router, message: seen.append(turn)
    for _ in range(10 * MAX_MESSAGES_PER_TURN):
        await router.send(ABORT)
    time.sleep(0.2)  # noqa: ASYNC251 (the loop stands still until all of it has arrived)
    while len(seen) < 10 * MAX_MESSAGES_PER_TURN:
        assert time.monotonic() < deadline and not rig.serving.done()
        turn += 1
        await asyncio.sleep(0)
    assert len(set(seen)) >= 10


async def test_a_silent_router_is_lost_and_may_come_back(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(router_timeout_s=0.05)
    router = rig.router()
    await router.hello()
    await rig.wait(lambda: rig.lost == [b"r"])
    assert rig.server.num_routers == 0
    await router.read_hello()
    await router.hello()
    await router.read_hello()
    await rig.wait(lambda: len(rig.lost) == 2)


@pytest.mark.slow
async def test_a_router_that_is_not_known_any_more_hears_so_once_a_heartbeat(make_rig: Callable[..., Rig]) -> None:
    """As after a freeze of either: it would go on as if its requests ran here."""
    rig = make_rig(router_timeout_s=0.05, heartbeat_s=0.5)
    router = rig.router()
    await router.hello()
    assert not (await router.read_hello()).lost_router
    await rig.wait(lambda: rig.lost == [b"r"])
    for _ in range(50):
        await router.send(RouterHeartbeat(router_id="r"))
        await router.send(ABORT)
    assert (await router.read_hello()).lost_router
    await rig.wait(lambda: rig.server.num_dropped_frames == 100)
    assert rig.server.num_routers == 0 and not rig.received
    await router.hello()
    told = 1
    while (hello := await router.read_hello()).lost_router:
        told += 1
    assert told < 10 and hello.worker_id == rig.worker_hello().worker_id


async def test_a_router_whose_connection_broke_is_lost_long_before_it_counts_as_silent(rig: Rig) -> None:
    leaving, staying = rig.router("leaving"), rig.router("staying")
    for router in (leaving, staying):
        await router.hello()
        await router.read_hello()
    leaving.socket.close()
    await rig.wait(lambda: rig.lost)
    assert rig.lost == [b"leaving"] and rig.server.num_routers == 1


async def test_only_a_router_that_stayed_is_warned_of(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """A router of several models greets each worker once from another socket, to learn what it serves."""
    caplog.set_level(logging.INFO)
    asking, staying = rig.router("asking"), rig.router("staying")
    for router in (asking, staying):
        await router.hello()
        await router.read_hello()
    await staying.send(RouterHeartbeat(router_id="staying"))
    await rig.wait(lambda: rig.server._routers[b"staying"].has_stayed)
    for router in (asking, staying):
        router.socket.close()
    await rig.wait(lambda: len(rig.lost) == 2)
    said = {record.getMessage(): record.levelname for record in caplog.records}
    assert {words: level for words, level in said.items() if not words.endswith(" connected")} == {
        "router asking disconnected after its hello": "INFO",
        "router staying lost (disconnected): ending its requests": "WARNING",
    }


async def test_any_message_is_a_sign_of_life(rig: Rig) -> None:
    router = rig.router()
    await router.hello()
    await rig.wait(lambda: rig.server.num_routers)
    peer = rig.server._routers[b"r"]
    for message in (RouterHeartbeat(router_id="r"), ABORT):
        peer.last_heard = earlier = time.monotonic() - 30.0  # half of what would make it silent
        await router.send(message)
        await rig.wait(lambda earlier=earlier: peer.last_heard > earlier)


async def test_a_restarted_router_is_a_new_one(rig: Rig) -> None:
    router = rig.router()
    await router.hello(epoch=1)
    await router.hello(epoch=1)
    await rig.wait(lambda: rig.server.num_routers)
    assert rig.lost == []
    successor = rig.router()
    await successor.hello(epoch=2)
    await successor.send(ABORT)
    await rig.wait(lambda: rig.received)
    assert rig.lost == [b"r"] and rig.server.num_routers == 1


async def test_the_router_with_the_least_id_plans_of_those_that_would(rig: Rig) -> None:
    assert rig.server.planner == ""
    for name, changes_roles in (("a", False), ("c", True), ("b", True)):
        router = rig.router(name)
        await router.send(RouterHello(router_id=name, epoch=1, changes_roles=changes_roles))
        await router.read()
    assert rig.server.planner == "b"


async def test_another_protocol_is_told_ours_and_refused(rig: Rig) -> None:
    router = rig.router()
    await router.hello(oldest=PROTOCOL_VERSION + 1, newest=PROTOCOL_VERSION + 2)
    assert await router.read() == rig.worker_hello()
    await router.send(ABORT)
    await rig.wait(lambda: rig.server.num_dropped_frames)
    assert rig.server.num_routers == 0


async def test_a_router_of_the_version_before_is_served(rig: Rig) -> None:
    router = rig.router()
    await router.hello(oldest=PROTOCOL_VERSION - 1, newest=0)
    assert await router.read() == rig.worker_hello()
    target = KVTarget("d", 1, "tcp://h:1")
    order = HandOver(
        request_id="a", attempt=0, new_attempt=1, target=target, num_output_tokens=0, num_reserved_tokens=0
    )
    await asyncio.to_thread(rig.server.send_threadsafe, [(router.name.encode(), order)])
    while not isinstance(message := await router.read(), HandOver):
        pass
    assert message == order


async def test_a_loaded_model_is_announced(rig: Rig) -> None:
    router = rig.router()
    await router.hello()
    await router.read_hello()
    rig.server.broadcast_hello()
    assert await router.read_hello() == rig.worker_hello()


async def test_the_engines_thread_may_send_in_order(rig: Rig) -> None:
    router = rig.router()
    await router.hello()
    await router.read_hello()
    aborts: list[tuple[bytes, Message]] = [(b"r", AbortRequest(request_id=str(n), attempt=0)) for n in range(50)]
    await asyncio.to_thread(rig.server.send_threadsafe, aborts)
    seen: list[str] = []
    while len(seen) < 50:
        if isinstance(message := await router.read(), AbortRequest):
            seen.append(message.request_id)
    assert seen == [str(n) for n in range(50)]


async def read_kind(router: Router, kind: type[Message]) -> AnyMessage:
    """The next message of a kind."""
    while not isinstance(message := await router.read(), kind):
        pass
    return message


async def test_every_router_hears_what_changed_in_the_cache_before_a_heartbeat_counts_it(rig: Rig) -> None:
    routers = [rig.router("r1"), rig.router("r2")]
    for router in routers:
        await router.hello()
        await router.read_hello()
    await rig.wait(lambda: rig.server.num_routers == 2)
    rig.blocks.stored(b"12345678")
    for router in routers:
        while not isinstance(message := await router.read(), BlockEvents):
            assert isinstance(message, WorkerHeartbeat) and message.block_sequence == 0
        assert message == BlockEvents(epoch=3, sequence=1, stored=b"12345678")
        beat = await read_kind(router, WorkerHeartbeat)
        assert isinstance(beat, WorkerHeartbeat) and beat.block_sequence == 1


async def test_a_router_that_asks_gets_all_that_is_cached_once(rig: Rig) -> None:
    asking, other = rig.router("asking"), rig.router("other")
    for router in (asking, other):
        await router.hello()
        await router.read_hello()
    rig.blocks.stored(b"12345678")
    for router in (asking, other):
        await read_kind(router, BlockEvents)
    for _ in range(3):  # faster than heartbeats: they get one answer or few
        await asking.send(BlockSnapshotRequest(epoch=3))
    snapshot = await read_kind(asking, BlockSnapshot)
    assert snapshot == BlockSnapshot(epoch=3, sequence=1, piece=0, num_pieces=1, hashes=b"12345678")
    seen = [type(await router.read()) for router in (other, asking) for _ in range(5)]
    assert set(seen[:5]) == {WorkerHeartbeat}, "the other router did not ask"
    assert not rig.received, "the engine has no part in it"


async def test_the_blocks_of_another_duty_are_told_from_event_1_on(rig: Rig) -> None:
    router = rig.router()
    await router.hello()
    await router.read_hello()
    rig.blocks.stored(b"12345678")
    await read_kind(router, BlockEvents)
    rig.blocks = BlockLog(epoch=4)
    rig.blocks.stored(b"abcdefgh")
    assert await read_kind(router, BlockEvents) == BlockEvents(epoch=4, sequence=1, stored=b"abcdefgh")
    await router.send(BlockSnapshotRequest(epoch=3))
    await router.send(BlockSnapshotRequest(epoch=4))
    snapshot = await read_kind(router, BlockSnapshot)
    assert snapshot == BlockSnapshot(epoch=4, sequence=1, piece=0, num_pieces=1, hashes=b"abcdefgh")


async def test_messages_for_a_router_that_is_gone_are_counted(rig: Rig) -> None:
    rig.server.send(b"nobody", ABORT)
    assert rig.server.num_unsent == 1


async def test_a_full_router_does_not_stop_the_others(rig: Rig) -> None:
    deaf, router = rig.router("deaf"), rig.router("r")
    await deaf.hello()
    await router.hello()
    await rig.wait(lambda: rig.server.num_routers == 2)
    deaf.socket.close()
    for _ in range(2000):
        rig.server.send(b"deaf", ABORT)
    await router.send(ABORT)
    await rig.wait(lambda: rig.received)

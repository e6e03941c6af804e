"""One DEALER against a plain ROUTER."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest
import zmq
import zmq.asyncio

from common.wire.codec import MAX_MESSAGES_PER_TURN, decode, encode
from common.wire.curve import Curve, KeyPair
from common.wire.message_fields import MAX_MESSAGE_BYTES
from common.wire.messages import AbortRequest, RequestFailed, RouterHeartbeat
from router.fleet.worker_connection import READ_S, ConnectionEvents, WorkerConnection


class Recorder:
    def __init__(self):
        self.ups, self.cuts, self.messages, self.unreadable = 0, 0, [], []

    def events(self):
        return ConnectionEvents(
            lambda address, message: self.messages.append(message),
            self.up,
            self.cut,
            on_unreadable=lambda address, why: self.unreadable.append((address, why)),
        )

    def up(self, address):
        self.ups += 1

    def cut(self, address):
        self.cuts += 1


@pytest.fixture
async def wire():
    """(router socket, open connection, recorder)"""
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.set(zmq.LINGER, 0)
    router.set(zmq.RCVHWM, 1)
    router.set(zmq.RCVBUF, 4096)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    recorder = Recorder()
    connection = WorkerConnection(f"tcp://127.0.0.1:{port}", "me", recorder.events(), hwm=2)
    connection.open(context)
    tasks = [asyncio.create_task(connection.receive()), asyncio.create_task(connection.watch())]
    yield router, connection, recorder
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    connection.close(0)
    router.close(linger=0)
    context.term()


async def test_it_tells_when_it_is_up_and_carries_its_name(wire, tools):
    router, connection, recorder = wire
    await tools.until(lambda: recorder.ups)
    assert connection.send(RouterHeartbeat(router_id="me"))
    name, payload = await router.recv_multipart()
    assert (name, decode(payload)) == (b"me", RouterHeartbeat(router_id="me"))


async def test_a_worker_that_does_not_read_refuses_at_once(wire, tools):
    _, connection, recorder = wire
    await tools.until(lambda: recorder.ups)
    message = AbortRequest(request_id="x" * 256, attempt=0)
    assert not all(connection.send(message) for _ in range(1_000_000))
    assert connection.counters.num_unsent == 1


async def test_nothing_is_queued_for_the_absent() -> None:
    context = zmq.asyncio.Context()
    connection = WorkerConnection("tcp://127.0.0.1:9", "me", Recorder().events(), hwm=2)
    connection.open(context)
    assert not connection.send(RouterHeartbeat(router_id="me"))
    connection.close(0)
    context.term()


async def test_aborts_are_kept_until_the_worker_is_back(wire, tools):
    router, connection, recorder = wire
    connection.abort("a", 3)
    await tools.until(lambda: recorder.ups)
    connection.flush_aborts()
    assert decode((await router.recv_multipart())[1]) == AbortRequest(request_id="a", attempt=3)


async def test_frames_that_cannot_be_read_are_told_and_the_next_is_read(wire, tools):
    router, connection, recorder = wire
    await tools.until(lambda: recorder.ups)
    assert connection.send(RouterHeartbeat(router_id="me"))
    name, _ = await router.recv_multipart()
    await router.send_multipart([name, b"\x00"])
    await router.send_multipart([name, b"two", b"parts"])
    await router.send_multipart([name, encode(RouterHeartbeat(router_id="me"))])
    failed = RequestFailed(worker_id="w", request_id="a", attempt=0, phase="decode", message="x", retryable=True)
    await router.send_multipart([name, encode(failed)])
    await tools.until(lambda: recorder.messages)
    assert recorder.messages == [failed] and {address for address, _ in recorder.unreadable} == {connection.address}
    reasons = [why for _, why in recorder.unreadable]
    assert len(reasons) == 3
    assert reasons[1:] == ["2 parts instead of 1", "unexpected RouterHeartbeat message"]


async def test_a_message_whose_signal_a_send_took_is_read(wire, tools):
    """A send handles what came meanwhile, and then the descriptor tells of nothing."""
    router, connection, recorder = wire
    await tools.until(lambda: recorder.ups)
    assert connection.send(RouterHeartbeat(router_id="me"))
    name, _ = await router.recv_multipart()
    failed = RequestFailed(worker_id="w", request_id="a", attempt=0, phase="decode", message="x", retryable=True)
    for _ in range(20):
        recorder.messages.clear()
        await router.send_multipart([name, encode(failed)])
        hold_up_the_loop()  # it must not see the signal first
        assert connection.send(RouterHeartbeat(router_id="me"))
        await tools.until(lambda: recorder.messages)


async def test_more_than_a_burst_is_read_in_order(wire, tools):
    router, connection, recorder = wire
    await tools.until(lambda: recorder.ups)
    assert connection.send(RouterHeartbeat(router_id="me"))
    name, _ = await router.recv_multipart()
    failures = [
        RequestFailed(worker_id="w", request_id=str(number), attempt=0, phase="decode", message="x", retryable=True)
        for number in range(3 * MAX_MESSAGES_PER_TURN)
    ]
    for failed in failures:
        await router.send_multipart([name, encode(failed)])
    await tools.until(lambda: len(recorder.messages) == len(failures))
    assert recorder.messages == failures


async def test_other_tasks_have_their_turn_after_a_message_that_takes_long(wire, tools):
    router, connection, recorder = wire
    await tools.until(lambda: recorder.ups)
    loop, turn, read_in = asyncio.get_running_loop(), 0, []

    def next_turn():
        nonlocal turn
        turn += 1
        if len(read_in) < 8:
            loop.call_soon(next_turn)

    def work(address, message):
        read_in.append(turn)
        time.sleep(READ_S * 1.5)

    connection.events = replace(connection.events, on_message=work)
    assert connection.send(RouterHeartbeat(router_id="me"))
    name, _ = await router.recv_multipart()
    failed = RequestFailed(worker_id="w", request_id="a", attempt=0, phase="decode", message="x", retryable=True)
    for _ in range(8):
        await router.send_multipart([name, encode(failed)])
    next_turn()
    await tools.until(lambda: len(read_in) == 8)
    assert len(set(read_in)) == 8


async def test_an_error_in_what_a_message_does_ends_the_reading_with_it(wire, tools):
    router, connection, recorder = wire
    await tools.until(lambda: recorder.ups)

    def fail(address, message):
        raise ZeroDivisionError("a bug")

    connection.events = replace(connection.events, on_message=fail)
    reading = asyncio.create_task(connection.receive())
    await asyncio.sleep(0)
    assert connection.send(RouterHeartbeat(router_id="me"))
    name, _ = await router.recv_multipart()
    failed = RequestFailed(worker_id="w", request_id="a", attempt=0, phase="decode", message="x", retryable=True)
    await router.send_multipart([name, encode(failed)])
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await reading


async def test_a_broken_connection_is_told(wire, tools):
    router, _, recorder = wire
    await tools.until(lambda: recorder.ups)
    router.close(linger=0)
    await tools.until(lambda: recorder.cuts)


async def test_a_worker_that_sent_too_large_a_message_is_connected_again(wire, tools):
    router, connection, recorder = wire
    await tools.until(lambda: recorder.ups)
    assert connection.send(RouterHeartbeat(router_id="me"))
    name, _ = await router.recv_multipart()
    await router.send_multipart([name, bytes(MAX_MESSAGE_BYTES + 1)])
    await tools.until(lambda: recorder.ups == 2)
    assert recorder.cuts == 1
    assert connection.send(RouterHeartbeat(router_id="me"))


@pytest.mark.slow
async def test_a_worker_with_keys_is_told_of_and_found_once_it_has_none(tools):
    context, told = zmq.asyncio.Context(), []
    secured = context.socket(zmq.ROUTER)
    Curve(KeyPair.generate()).serve(secured)
    port = secured.bind_to_random_port("tcp://127.0.0.1")
    recorder = Recorder()
    events = replace(recorder.events(), on_refused=lambda address, why: told.append((address, why)))
    connection = WorkerConnection(f"tcp://127.0.0.1:{port}", "me", events, hwm=2)
    connection.open(context)
    watching = asyncio.create_task(connection.watch())
    certain = (connection.address, "it requires CURVE, but this process has no --curve-key")
    await tools.until(lambda: certain in told)  # a guess may come first: who hangs up first is chance
    assert not connection.send(RouterHeartbeat(router_id="me")) and recorder.cuts == 0
    secured.close(linger=0)
    plain = context.socket(zmq.ROUTER)
    await tools.until(lambda: can_bind(plain, port))
    await tools.until(lambda: recorder.ups)
    assert connection.send(RouterHeartbeat(router_id="me"))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    connection.close(0)
    plain.close(linger=0)
    context.term()


def hold_up_the_loop():
    time.sleep(0.02)


def can_bind(socket, port):
    try:
        socket.bind(f"tcp://127.0.0.1:{port}")
    except zmq.ZMQError:  # the port of a closed socket is free a moment later
        return False
    return True


async def test_one_that_cannot_be_opened_leaves_no_socket():
    """An open socket would keep the router from ending, for ever."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, 1)  # none is left for its monitor
    connection = WorkerConnection("tcp://127.0.0.1:9", "me", Recorder().events(), hwm=2)
    with pytest.raises(zmq.ZMQError):
        connection.open(context)
    connection.close(0)
    ending = threading.Thread(target=context.term, daemon=True)
    ending.start()
    await asyncio.to_thread(ending.join, 60.0)
    assert not ending.is_alive()

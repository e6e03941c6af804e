"""The sockets of one transfer's connection: their I/O threads, and how they are connected again."""

from __future__ import annotations

import time

import pytest
import zmq

from common.engine.transfer.connection import KVConnection
from common.engine.transfer.frames import MAX_REPLY_BYTES, try_send
from common.wire import allow_many_sockets
from common.wire.codec import decode
from common.wire.messages import KVAck


@pytest.mark.parametrize(("io_threads", "expected"), [(1, [1, 1, 1]), (2, [1, 2, 1]), (4, [1, 2, 4])])
def test_each_stream_has_a_thread_of_its_own_as_far_as_there_are(io_threads: int, expected: list[int]) -> None:
    with zmq.Context(io_threads) as context:
        connection = KVConnection(context, zmq.Poller(), "tcp://127.0.0.1:1", 3)
        assert [stream.get(zmq.AFFINITY) for stream in connection.streams] == expected
        connection.close()


def test_a_stream_that_gets_a_frame_that_is_too_large_is_connected_again() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.set(zmq.LINGER, 0)
        port, until = router.bind_to_random_port("tcp://127.0.0.1"), time.monotonic() + 60
        connection = KVConnection(context, zmq.Poller(), f"tcp://127.0.0.1:{port}", 1)
        try:
            connection.streams[0].send(b"open")
            assert router.poll(60_000)
            name, _ = router.recv_multipart()
            router.send_multipart([name, bytes(MAX_REPLY_BYTES + 1)])
            while not router.poll(10):
                assert time.monotonic() < until
                if connection.dial_again(time.monotonic()):  # ZeroMQ may still take messages for the abandoned one
                    try_send(connection.streams[0], KVAck(request_id="again", attempt=0))
            assert decode(router.recv_multipart()[1]) == KVAck(request_id="again", attempt=0)
        finally:
            connection.close()


def test_a_worker_sends_to_more_than_a_thousand_others() -> None:
    with zmq.Context() as context:
        allow_many_sockets(context)
        connection = KVConnection(context, zmq.Poller(), "tcp://127.0.0.1:1", 1)
        sockets = []
        try:
            for _ in range(1_100):
                sockets.append(context.socket(zmq.DEALER))
        finally:
            for socket in sockets:
                socket.close(linger=0)
            connection.close()

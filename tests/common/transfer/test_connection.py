"""The sockets of one transfer's connection share a worker's I/O threads evenly."""

from __future__ import annotations

import pytest
import zmq

from common.transfer.connection import KVConnection


@pytest.mark.parametrize(("io_threads", "expected"), [(1, [1, 1, 1]), (2, [1, 2, 1]), (4, [1, 2, 4])])
def test_each_stream_has_a_thread_of_its_own_as_far_as_there_are(io_threads: int, expected: list[int]) -> None:
    with zmq.Context(io_threads) as context:
        connection = KVConnection(context, zmq.Poller(), "tcp://127.0.0.1:1", 3)
        assert [stream.get(zmq.AFFINITY) for stream in connection.streams] == expected
        connection.close()

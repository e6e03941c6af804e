"""Messages between ranks: whole, in order, and never waited for without end."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from common.engine.ranks.channel import Channel
from common.engine.vllm.connection import LOST_S, configured, normalized_address, split_address
from common.errors import RankLost

Ends = tuple[Channel, Channel]


@pytest.fixture(params=["pair", "connection"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Of one host, and of two."""
    first, second = Channel.pair() if request.param == "pair" else connection()
    pair = Channel(first, "rank 1"), Channel(second, "rank 0")
    yield pair
    for end in pair:
        end.close()


def connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        second, _ = listener.accept()
    return configured(first), configured(second)


def test_messages_come_whole_and_in_order(ends: Ends) -> None:
    bodies = [b"", b"x", bytes(range(256)) * 20_000]
    sender = threading.Thread(target=lambda: [ends[0].send(body, 5.0) for body in bodies])
    sender.start()
    assert [ends[1].receive(5.0) for _ in bodies] == bodies
    sender.join()


@pytest.mark.parametrize("ends", ["pair"], indirect=True)
def test_a_file_is_given_between_messages(ends: Ends) -> None:
    descriptor = os.memfd_create("given")
    os.write(descriptor, b"content")
    ends[0].send(b"before", 1.0)
    ends[0].send_descriptor(descriptor, 1.0)
    ends[0].send(b"behind", 1.0)
    os.close(descriptor)
    assert ends[1].receive(1.0) == b"before"
    given = ends[1].receive_descriptor(1.0)
    assert (os.pread(given, 10, 0), ends[1].receive(1.0)) == (b"content", b"behind")
    os.close(given)


def test_silence_ends_at_the_deadline(ends: Ends) -> None:
    began = time.monotonic()
    with pytest.raises(RankLost, match="cannot receive from rank 1: timed out"):
        ends[0].receive(0.05)
    with pytest.raises(RankLost, match="cannot receive a file from rank 1: timed out"):
        ends[0].receive_descriptor(0.05)
    assert time.monotonic() - began < 30.0


def test_messages_that_nobody_reads_end_at_the_deadline(ends: Ends) -> None:
    with pytest.raises(RankLost, match="cannot send to rank 1: timed out"):
        ends[0].send(bytes(16 * 2**20), 0.05)


def test_a_few_bytes_are_sent_without_a_wait_and_drained(ends: Ends) -> None:
    assert not ends[0].drain()
    for _ in range(100_000):  # they are dropped once the other end leaves too many
        ends[1].try_send(b"x")
    assert ends[0].drain() and not ends[0].drain()
    ends[0].send(b"step", 1.0)
    assert ends[1].receive(1.0) == b"step"
    ends[1].close()
    ends[0].try_send(b"x")
    assert not ends[0].drain() and ends[0].is_cut()


def test_the_end_of_a_process_is_seen_at_once(ends: Ends) -> None:
    assert not ends[0].is_cut()
    waiting = threading.Thread(target=lambda: ends[0].is_cut(None))
    waiting.start()
    ends[1].close()
    waiting.join(5.0)
    assert not waiting.is_alive()
    assert ends[0].is_cut()
    with pytest.raises(RankLost, match="rank 1 is gone"):
        ends[0].receive(None)
    with pytest.raises(RankLost, match="cannot send to rank 1"):
        for _ in range(100):  # the first one on a connection only asks for the answer that the other end is gone
            ends[0].send(b"x", 1.0)
            time.sleep(0.01)
    with pytest.raises(RankLost, match="rank 1 passed no file"):
        ends[0].receive_descriptor(1.0)


def test_a_size_out_of_bounds_is_refused(ends: Ends) -> None:
    ends[0].send(bytes(10), 1.0)
    with pytest.raises(RankLost, match="rank 0 sent a message of 10 bytes, the limit is 9"):
        ends[1].receive(1.0, 9)


def test_a_message_that_waits_is_seen(ends: Ends) -> None:
    assert not ends[0].has_message()
    ends[1].send(b"x", 1.0)
    assert ends[0].has_message() and not ends[0].is_cut()
    ends[0].receive(1.0)
    assert not ends[0].has_message()


def test_a_cut_is_seen_at_both_ends(ends: Ends) -> None:
    ends[0].cut()
    assert ends[0].is_cut(1.0) and ends[1].is_cut(1.0)
    ends[0].cut()


def test_a_silent_host_is_cut_off_in_time() -> None:
    """What the kernel was told: no test can silence a kernel."""
    first, second = connection()
    with first, second:
        probes = first.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
        every_s = first.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        idle_s = first.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        assert idle_s + probes * every_s == LOST_S
        assert first.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == LOST_S * 1000
        assert first.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert first.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_addresses_of_both_families() -> None:
    assert split_address("10.0.0.7:7005") == ("10.0.0.7", 7005)
    assert split_address("[fd00::7]:7005") == ("fd00::7", 7005)
    assert normalized_address("::ffff:10.0.0.7") == "10.0.0.7"
    assert (normalized_address("fe80::1%eth0"), normalized_address("10.0.0.7")) == ("fe80::1", "10.0.0.7")

"""Messages between ranks: whole, in order, and never waited for without end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from common.errors import RankLost
from common.ranks import channel as module
from common.ranks.channel import Channel

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    first, second = Channel.pair()
    pair = Channel(first, "rank 1"), Channel(second, "rank 0")
    yield pair
    for end in pair:
        end.close()


def test_messages_come_whole_and_in_order(ends: Ends) -> None:
    bodies = [b"", b"x", bytes(range(256)) * 20_000]
    sender = threading.Thread(target=lambda: [ends[0].send(body, 5.0) for body in bodies])
    sender.start()
    assert [ends[1].receive(5.0) for _ in bodies] == bodies
    sender.join()


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
    with pytest.raises(RankLost, match="rank 1 sends nothing: timed out"):
        ends[0].receive(0.05)
    with pytest.raises(RankLost, match="rank 1 gave no file: timed out"):
        ends[0].receive_descriptor(0.05)
    assert time.monotonic() - began < 5.0


def test_messages_that_nobody_reads_end_at_the_deadline(ends: Ends) -> None:
    with pytest.raises(RankLost, match="rank 1 takes no messages: timed out"):
        ends[0].send(bytes(16 * 2**20), 0.05)


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
    with pytest.raises(RankLost, match="rank 1 takes no messages"):
        ends[0].send(b"x", 1.0)
    with pytest.raises(RankLost, match="rank 1 gave no file, or is gone"):
        ends[0].receive_descriptor(1.0)


def test_a_size_out_of_bounds_is_refused(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 9)
    ends[0].send(bytes(10), 1.0)
    with pytest.raises(RankLost, match="rank 0 sent 10 bytes, at most 9 are taken"):
        ends[1].receive(1.0)

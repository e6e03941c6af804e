"""Which hosts join a worker, and which do not: real connections, in one process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from common.engine.ranks.channel import Channel
from common.engine.vllm import admission, rank_hosts
from common.engine.vllm.admission import (
    Handshake,
    JoinRequest,
    JoinResponse,
    NotAdmitted,
    Purpose,
    Versions,
    key_of,
)
from common.engine.vllm.connection import dial
from common.engine.vllm.rank_hosts import JoinedHost, RankHosts
from common.errors import ConfigError, RankLost
from common.wire.curve import KeyPair, write_key_pair
from common.wire.listening import listen

from ....waiting import wait_until

KEY = b"k" * 32
WAIT_S = 30.0


class Rendezvous:
    """A worker that waits for its hosts on a thread, and what hosts do."""

    def __init__(self, num_others: int, timeout_s: float) -> None:
        listener = listen("127.0.0.1", 0, 16)
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.hosts = RankHosts(listener, KEY, num_others)
        self.joined: Sequence[JoinedHost] = ()
        self.problem = ""
        self.channels: list[Channel] = []
        self.thread = threading.Thread(target=self._wait, args=(timeout_s,))
        self.thread.start()

    def _wait(self, timeout_s: float) -> None:
        try:
            self.joined = self.hosts.wait(timeout_s)
        except RankLost as error:
            self.problem = str(error)

    def ask(self, purpose: Purpose, key: bytes = KEY, **request: Any) -> JoinResponse:
        channel = dial(self.address)
        self.channels.append(channel)
        handshake = Handshake(channel, key, leads=False)
        handshake.send(JoinRequest(purpose=purpose, **{"versions": Versions.of_this_host(), **request}))
        return handshake.receive(JoinResponse)

    def join(self) -> JoinResponse:
        """Open both connections of a host."""
        host = self.ask("host")
        assert not self.ask("engine", session=host.session).problem
        return host

    def end(self) -> None:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        for host in self.joined:
            host.close()
        for channel in self.channels:
            channel.close()


@contextmanager
def rendezvous(num_others: int = 1, timeout_s: float = WAIT_S) -> Iterator[Rendezvous]:
    found = Rendezvous(num_others, timeout_s)
    try:
        yield found
    finally:
        found.end()


def test_hosts_join_with_two_connections_each() -> None:
    with rendezvous(num_others=2) as both:
        sessions = [both.join().session for _ in range(2)]
        both.thread.join(WAIT_S)
        assert [host.session for host in both.joined] == sessions
        assert [host.control.peer for host in both.joined] == ["host 1 at 127.0.0.1", "host 2 at 127.0.0.1"]
        engine = both.joined[1].engine
        assert engine is not None and engine.peer == "host 2 at 127.0.0.1"
        engine.send(b"to host 2", 1.0)
        assert both.channels[3].receive(1.0) == b"to host 2"
        with pytest.raises(ConnectionRefusedError):
            dial(both.address)  # no further host is admitted


def test_another_key_is_refused_at_both_ends(caplog: pytest.LogCaptureFixture) -> None:
    with rendezvous() as one:
        with pytest.raises(NotAdmitted, match=r"the worker at 127\.0\.0\.1:\d+ is refused: its --curve-key differs"):
            one.ask("host", key=b"x" * 32)
        with pytest.raises(NotAdmitted, match="or is missing on one side"):
            one.ask("host", key=b"")
        one.join()
    assert "dropped a connection to the rank port: the connection from 127.0.0.1 is refused: its" in caplog.text


def test_an_overheard_proof_serves_only_once() -> None:
    """The same message with the proof of another connection."""
    with rendezvous() as one:
        first, second = dial(one.address), dial(one.address)
        one.channels += [first, second]
        sent: list[bytes] = []
        handshake = Handshake(first, KEY, leads=False)
        first.send = lambda message, timeout_s: sent.append(bytes(message))  # type: ignore[method-assign]
        handshake.send(JoinRequest(purpose="host", versions=Versions.of_this_host()))
        again = Handshake(second, KEY, leads=False)
        second.send(sent[0], 1.0)
        answer = again.receive(JoinResponse)
        assert "its --curve-key differs" in answer.problem
        first.close()
        one.join()


def test_other_versions_are_refused_with_both() -> None:
    with rendezvous() as one:
        ours = Versions.of_this_host()
        answer = one.ask("host", versions=Versions("0.0.9", "2.9.0", "0.32.1"))
        assert answer.problem == (
            f"it has Diptych 0.0.9 with torch 2.9.0 and vLLM 0.32.1, the worker has {ours}: install the same versions "
            "on every host of the worker"
        )
        assert not answer.again
        one.join()


def test_one_host_too_many_may_come_again() -> None:
    with rendezvous() as one:
        first = one.ask("host")
        second = one.ask("host")
        assert (second.problem, second.again) == ("all 2 hosts of --rank-hosts have already joined", True)
        assert one.ask("engine", session=b"another").problem == "its host has not joined"
        assert not one.ask("engine", session=first.session).problem


def test_a_host_that_dies_before_all_are_there_makes_room() -> None:
    with rendezvous(num_others=2) as both:
        both.join()
        gone = both.ask("host")
        both.channels[-1].close()
        deadline = time.monotonic() + WAIT_S
        while (other := both.ask("host")).problem:
            assert other.again and time.monotonic() < deadline
            time.sleep(0.05)
        assert other.session != gone.session
        assert both.ask("engine", session=gone.session).problem == "its host has not joined"
        assert not both.ask("engine", session=other.session).problem
        both.thread.join(WAIT_S)
        assert len(both.joined) == 2


def test_connections_that_say_nothing_delay_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "ADMISSION_S", 4.0)
    with rendezvous() as one:
        silent = [dial(one.address) for _ in range(8)]
        one.channels += silent
        one.join()
        for channel in silent:
            channel.receive(WAIT_S)  # its nonce
            with pytest.raises(RankLost, match="is gone"):
                channel.receive(WAIT_S)


def test_connections_that_prove_nothing_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_hosts, "MOST_HANDSHAKES", 2)
    with rendezvous() as one:
        silent = [dial(one.address) for _ in range(2)]
        one.channels += silent
        for channel in silent:
            channel.receive(5.0)
        with pytest.raises(RankLost):
            one.ask("host")
        silent[0].close()
        wait_until(lambda: one.hosts._num_handshakes == 1)
        host = one.ask("host")
        wait_until(lambda: one.hosts._num_handshakes == 1)
        assert not one.ask("engine", session=host.session).problem


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", (2**40).to_bytes(8, "little"), b"\x05" + bytes(7) + b"hello"]
)
def test_garbage_is_closed(said: bytes) -> None:
    with rendezvous() as one:
        host, _, port = one.address.rpartition(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(said)
            stranger.settimeout(5.0)
            with suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
        one.join()


def test_who_is_missing_is_said() -> None:
    with rendezvous(num_others=2, timeout_s=2.0) as both:
        both.join()
        both.thread.join(WAIT_S)
        host, _, port = both.address.rpartition(":")
        assert both.problem == (
            f"1 of 2 other hosts have joined at {host}:{port} within 2 s: start `diptych rank-host --leader` with "
            "this address on each of them"
        )
        assert all(channel.is_cut(5.0) for channel in both.channels)


def test_keys_come_from_the_file_of_a_pair(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a.key", "b.key")]
    for file in files:
        write_key_pair(file, KeyPair.generate())
    assert key_of(files[0]) == key_of(files[0]) != key_of(files[1])
    assert key_of("") == b""
    with pytest.raises(ConfigError, match="a file written by `diptych keygen`"):
        key_of(str(tmp_path / "missing"))


def test_what_is_no_rank_of_diptych_is_said() -> None:
    """An HTTP server at the address of the worker."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        channel = dial(f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(RankLost, match="sent a message of [0-9]+ bytes, the limit is 4096"):
            Handshake(channel, KEY, leads=False)
        channel.close()
        thread.join()

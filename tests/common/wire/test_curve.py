"""Processes that may talk to each other: plain and CURVE, equal, authorised and unknown keys, their rotation."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from common.wire.curve import Curve, KeyPair
from common.wire.gatekeeper import ZAP_ADDRESS, Gatekeeper
from common.wire.sockets import WATCHED, Dialer, bind

A, B, C = (KeyPair.generate() for _ in range(3))
WAIT_S = 60.0
MOST_BYTES = 1000


class Server:
    """A bound ROUTER and, with keys, its gatekeeper."""

    def __init__(self, curve: Curve | None, port: int = 0) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.gatekeeper = Gatekeeper(self.context, curve) if curve else None
        if self.gatekeeper:
            self.gatekeeper.start()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.address = bind(self.socket, "127.0.0.1", port, curve)

    def close(self) -> None:
        self.socket.close()
        if self.gatekeeper:
            self.gatekeeper.stop()
            assert self.gatekeeper.failure is None
        self.context.term()


class Client:
    """A DEALER that dials like a router and a sender do."""

    def __init__(self, curve: Curve | None, address: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.IMMEDIATE, 1)
        self.socket.set(zmq.RECONNECT_IVL, 20)
        self.socket.set(zmq.MAXMSGSIZE, MOST_BYTES)
        self.monitor = self.socket.get_monitor_socket(WATCHED)
        self.dialer = Dialer(self.socket, address, curve)
        self.num_ups = 0

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, f"the condition did not come true; refusal: {self.dialer.refusal!r}"
            if self.monitor.poll(10):
                event = self.dialer.on_event(self.monitor.recv_multipart(), time.monotonic())
                self.num_ups += event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            elif time.monotonic() >= self.dialer.dial_at:
                self.dialer.dial()

    def until_up(self, num_ups: int) -> None:
        """Wait for handshake number `num_ups`."""
        self.until(lambda: self.num_ups == num_ups)

    def talks_to(self, server: Server, word: bytes = b"hello") -> bool:
        """Sends once it is connected, and the server reads it."""
        self.until(lambda: self.socket.poll(0, zmq.POLLOUT))
        self.socket.send(word, zmq.NOBLOCK)
        assert server.socket.poll(int(WAIT_S * 1000))
        return server.socket.recv_multipart()[1:] == [word]

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()
        self.context.term()


class Network:
    def __init__(self, folder: Path) -> None:
        self.folder, self.open_ends = folder, list[Server | Client]()

    def keys(self, pair: KeyPair | None, *authorized: KeyPair) -> Curve | None:
        return Curve(pair, self.listed(*authorized) if authorized else "") if pair else None

    def listed(self, *pairs: KeyPair, name: str = "") -> str:
        path = self.folder / (name or f"list-{len(list(self.folder.iterdir()))}")
        path.write_text("".join(f"{pair.public.decode()} somebody\n" for pair in pairs))
        return str(path)

    def serve(self, curve: Curve | None, port: int = 0) -> Server:
        self.open_ends.append(Server(curve, port))
        return self.open_ends[-1]  # type: ignore[return-value]

    def dial(self, curve: Curve | None, address: str) -> Client:
        self.open_ends.append(Client(curve, address))
        return self.open_ends[-1]  # type: ignore[return-value]

    def close(self) -> None:
        for end in reversed(self.open_ends):
            end.close()


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    network = Network(tmp_path)
    yield network
    network.close()


@pytest.mark.parametrize(
    ("client", "server"),
    [
        pytest.param((None,), (None,), id="both plain"),
        pytest.param((A,), (A,), id="one pair for all"),
        pytest.param((A, B), (B, A), id="two pairs that trust each other"),
        pytest.param((B, C, A), (A, B), id="the third key is the server's"),
    ],
)
def test_who_trusts_each_other_talks(network: Network, client: tuple[KeyPair], server: tuple[KeyPair]) -> None:
    there = network.serve(network.keys(*server))
    assert network.dial(network.keys(*client), there.address).talks_to(there)
    assert there.gatekeeper is None or there.gatekeeper.num_refused == 0


@pytest.mark.parametrize(
    ("client", "server", "why"),
    [
        pytest.param((None,), (A,), "requires CURVE", id="plain to CURVE"),
        pytest.param((A,), (None,), "does not use CURVE", id="CURVE to plain"),
        pytest.param((B,), (A,), "may not be among the 1", id="strangers", marks=pytest.mark.slow),
        pytest.param((B,), (A, B), "may not be among the 1", id="only the server trusts", marks=pytest.mark.slow),
        pytest.param((B, A), (A,), "does not authorise", id="only the client trusts"),
        pytest.param((B, C), (A,), "may not be among the 2", id="no key of several", marks=pytest.mark.slow),
    ],
)
def test_who_does_not_is_refused_and_told_why(
    network: Network, client: tuple[KeyPair], server: tuple[KeyPair], why: str
) -> None:
    there = network.serve(network.keys(*server))
    here = network.dial(network.keys(*client), there.address)
    here.until(lambda: why in here.dialer.refusal)
    assert not here.socket.poll(0, zmq.POLLOUT) and not there.socket.poll(0)
    if there.gatekeeper is not None:
        assert (there.gatekeeper.num_refused > 0) is (why == "does not authorise")


def test_an_honest_client_is_served_while_a_stranger_knocks(network: Network) -> None:
    there = network.serve(network.keys(A))
    stranger = network.dial(network.keys(B, A), there.address)
    stranger.until(lambda: stranger.dialer.refusal)
    assert network.dial(network.keys(A), there.address).talks_to(there)


def test_a_stranger_is_named_by_address_and_public_key(network: Network, caplog: pytest.LogCaptureFixture) -> None:
    there = network.serve(network.keys(A))
    stranger = network.dial(network.keys(B, A), there.address)
    stranger.until(lambda: stranger.dialer.refusal)
    assert f"127.0.0.1: public key {B.public.decode()} is not authorised" in caplog.text
    assert all(pair.secret.decode() not in caplog.text for pair in (A, B))


@pytest.mark.slow
def test_without_a_gatekeeper_nobody_comes_in(network: Network) -> None:
    there = network.serve(network.keys(A))
    assert there.gatekeeper is not None
    there.gatekeeper.stop()
    here = network.dial(network.keys(A), there.address)
    here.until(lambda: here.dialer.refusal)
    assert not there.socket.poll(0)
    there.gatekeeper = None


@pytest.mark.parametrize("num_parts", [0, 1, 6, 8])
def test_a_question_that_is_none_is_answered_with_no(network: Network, num_parts: int) -> None:
    there = network.serve(network.keys(A))
    ask = there.context.socket(zmq.REQ)
    ask.set(zmq.LINGER, 0)
    ask.connect(ZAP_ADDRESS)
    ask.send_multipart([b"1.0", b"7", b"diptych", b"1.2.3.4", b"", b"CURVE", b"k" * 32, b"more"][:num_parts] or [b""])
    assert ask.poll(int(WAIT_S * 1000))
    assert ask.recv_multipart()[2] == b"400"
    ask.close()
    assert network.dial(network.keys(A), there.address).talks_to(there)


def test_keys_rotate_while_everybody_talks(network: Network) -> None:
    """From A to B: everyone trusts both, then servers and clients change one by one, then A is trusted no more."""
    trusted = network.listed(B, name="trusted")
    old_client, server = Curve(A, trusted), network.serve(Curve(A, trusted))
    assert network.dial(old_client, server.address).talks_to(server)
    network.listed(A, B, name="trusted")
    port = int(server.address.rpartition(":")[2])
    client = network.dial(old_client, server.address)
    assert client.talks_to(server, b"before")
    network.open_ends.remove(server)
    server.close()
    client.until(lambda: not client.socket.poll(0, zmq.POLLOUT))  # else it might speak to the one that is gone
    server = network.serve(Curve(B, trusted), port)
    assert client.talks_to(server, b"to the new server, with the old key")
    assert network.dial(Curve(B, trusted), server.address).talks_to(server, b"with the new key")
    network.listed(B, name="trusted")
    revoked = network.dial(old_client, server.address)
    revoked.until(lambda: "does not authorise" in revoked.dialer.refusal)
    assert network.dial(Curve(B, trusted), server.address).talks_to(server)


def test_a_list_that_became_bad_changes_nothing(network: Network, caplog: pytest.LogCaptureFixture) -> None:
    path = Path(network.listed(B))
    curve = Curve(A, str(path))
    for spoil in (lambda: path.write_text("nonsense"), path.unlink):
        spoil()
        assert set(curve.trusted()) == {A.public, B.public}
        assert list(curve.trusted()) == [A.public, B.public]
    assert len([line for line in caplog.messages if "keeping the previous ones" in line]) == 2
    network.listed(C, name=path.name)
    assert set(curve.trusted()) == {A.public, C.public}


@pytest.mark.slow
def test_a_server_that_changes_its_mind_is_found_again(network: Network) -> None:
    """ZeroMQ itself never tries again after a mechanism that does not fit, or what is no ZeroMQ."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        here = network.dial(network.keys(A), f"tcp://127.0.0.1:{port}")
        for _ in range(2):
            accepted, _ = silent.accept()
            accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9)
            accepted.close()
            here.until(lambda: here.dialer.dial_at < time.monotonic() + 10)
            here.until(lambda: here.dialer.dial_at > time.monotonic() + 10)
    plain = network.serve(None, port)
    here.until(lambda: "does not use CURVE" in here.dialer.refusal)  # or may: who hangs up first is chance
    network.open_ends.remove(plain)
    plain.close()
    there = network.serve(network.keys(A), port)
    assert here.talks_to(there)
    here.until(lambda: not here.dialer.refusal)  # the socket may be ready before its monitor has said so


@pytest.mark.parametrize("pair", [pytest.param(None, id="plain"), pytest.param(A, id="CURVE")])
def test_a_connection_that_this_side_closes_is_made_again(network: Network, pair: KeyPair | None) -> None:
    """ZeroMQ closes it because of a frame that is too large or malformed, and does not reconnect by itself."""
    there = network.serve(network.keys(pair))
    here = network.dial(network.keys(pair), there.address)
    for num_ups in (1, 2):
        here.until_up(num_ups)
        here.socket.send(b"hello")
        name, word = there.socket.recv_multipart()
        assert word == b"hello"
        there.socket.send_multipart([name, bytes(MOST_BYTES + 1)])


def test_a_connection_that_the_other_side_closes_is_made_again_once(network: Network) -> None:
    there = network.serve(None)
    here = network.dial(None, there.address)
    assert here.talks_to(there)
    here.until_up(1)
    port = int(there.address.rpartition(":")[2])
    network.open_ends.remove(there)
    there.close()
    there = network.serve(None, port)
    here.until_up(2)
    assert here.dialer.dial_at == math.inf
    assert here.talks_to(there)

"""What `::` listens on, and hosts in URLs."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import pytest
import zmq

from common.wire.listening import has_ipv6, in_url, listen, listening_host


@pytest.mark.parametrize(
    ("host", "url"), [("10.0.0.7", "10.0.0.7"), ("worker.example", "worker.example"), ("fd00::7", "[fd00::7]")]
)
def test_a_host_in_a_url(host: str, url: str) -> None:
    assert in_url(host) == url


def test_all_addresses_are_those_that_there_are() -> None:
    assert listening_host("::", ipv6=True) == "::"
    assert listening_host("::", ipv6=False) == "0.0.0.0"
    assert listening_host("::1", ipv6=False) == "::1"  # asked for by name: an error is better than another address


def connects(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(("host", "families"), [("::", {4, 6}), ("0.0.0.0", {4}), ("::1", {6}), ("127.0.0.1", {4})])
def test_what_reaches_it(host: str, families: set[int]) -> None:
    if ":" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with listen(host, 0, 8) as listener:
        port = listener.getsockname()[1]
        ipv4 = "127.0.0.2" if host == "::1" else "127.0.0.1"  # at 127.0.0.1 another process may have that port
        assert {4: connects(ipv4, port), 6: connects("::1", port)} == {n: n in families for n in (4, 6)}


BOUND = """
import zmq
from common.wire.sockets import bind
from common.wire.listening import inherited
context = zmq.Context()
socket = context.socket(zmq.ROUTER)
print(bind(socket, "127.0.0.1", 0, listener=inherited()), inherited(), flush=True)
print(socket.recv_multipart()[1].decode(), flush=True)
"""


def test_a_zeromq_socket_takes_the_listener_of_its_parent_whose_connections_waited() -> None:
    with listen("127.0.0.1", 0, 8) as listener, zmq.Context() as context, context.socket(zmq.DEALER) as client:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        client.set(zmq.LINGER, 0)
        client.connect(address)
        client.send(b"early")
        for _ in range(2):  # the second one takes the place of the first
            command = [sys.executable, "-c", BOUND]
            with subprocess.Popen(command, stdin=listener, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                assert [process.stdout.readline().split(), process.stdout.readline()] == [[address, "None"], "early\n"]
                process.kill()
            client.send(b"early")


@pytest.mark.parametrize("given", ["nothing", "pipe", "connection"])
def test_another_standard_input_is_no_listener(given: str) -> None:
    stdin: Any = {"nothing": subprocess.DEVNULL, "pipe": subprocess.PIPE}.get(given)
    ends = socket.socketpair()
    program = "from common.wire.listening import inherited; print(inherited())"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=stdin or ends[0], stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate(timeout=60)[0] == "None\n"
    for end in ends:
        end.close()

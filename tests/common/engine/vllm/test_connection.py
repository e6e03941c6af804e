"""Which network interface leads to a host."""

from __future__ import annotations

import ipaddress
import socket

import pytest

import common.engine.vllm.connection as interface
from common.engine.vllm.connection import addresses_of, interface_to
from common.errors import RankLost


def test_the_route_to_this_host_is_loopback() -> None:
    assert interface_to("127.0.0.1") == "lo"
    assert ipaddress.ip_address("127.0.0.1") in addresses_of("lo")


def test_the_route_to_an_interface_of_this_host_is_that_interface() -> None:
    """By which other hosts reach it: rank 0 names its own address to the ranks of its host."""
    for _, name in socket.if_nameindex():
        for address in addresses_of(name):
            if not address.is_link_local:
                assert interface_to(str(address)) == name


def test_a_route_whose_address_no_interface_has_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "addresses_of", lambda name: set())
    with pytest.raises(RankLost, match=r"no network interface has the address 127\.0\.0\.1 .* GLOO_SOCKET_IFNAME"):
        interface_to("127.0.0.1")
    with pytest.raises(RankLost, match="no route to no-such-host"):
        interface_to("no-such-host.invalid")

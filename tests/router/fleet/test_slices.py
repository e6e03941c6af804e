"""What a set of EndpointSlices amounts to."""

from __future__ import annotations

import json
from typing import Any

from router.fleet.discovery import Endpoint
from router.fleet.slices import EndpointSlice, SliceStore, parse

from ...kubernetes_api import endpoint


def slice_of(name: str, service: str, endpoints: Any, **fields: Any) -> EndpointSlice:
    found = {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "ports": [{"name": "control", "port": 7001}],
        "addressType": "IPv4",
        "endpoints": endpoints,
        **fields,
    }
    return parse(json.dumps(found).encode(), EndpointSlice)


def endpoints_of(*slices: EndpointSlice) -> list[Endpoint]:
    store = SliceStore({"p": "prefill", "d": "decode"})
    for found in slices:
        store.put(found)
    return list(store.endpoints())


def test_absent_conditions_mean_ready() -> None:
    assert endpoints_of(slice_of("s", "d", [{"addresses": ["10.0.0.1"]}])) == [
        Endpoint("decode", "tcp://10.0.0.1:7001")
    ]
    (unready,) = endpoints_of(slice_of("s", "d", [{"addresses": ["10.0.0.1"], "conditions": {"ready": False}}]))
    assert not unready.serving


def test_slices_of_a_service_are_merged_and_an_address_is_there_once() -> None:
    found = endpoints_of(
        slice_of("s1", "d", [endpoint("10.0.0.1", serving=False, ready=False), endpoint("10.0.0.2")]),
        slice_of("s2", "d", [endpoint("10.0.0.1", serving=True), endpoint("10.0.0.3", terminating=True)]),
        slice_of("s3", "p", [endpoint("10.0.0.4")]),
    )
    assert found == [
        Endpoint("decode", "tcp://10.0.0.1:7001"),
        Endpoint("decode", "tcp://10.0.0.2:7001"),
        Endpoint("decode", "tcp://10.0.0.3:7001", terminating=True),
        Endpoint("prefill", "tcp://10.0.0.4:7001"),
    ]


def test_a_pod_of_both_families_is_one_worker() -> None:
    found = endpoints_of(
        slice_of("s4", "d", [endpoint("10.0.0.1", uid="pod-1")]),
        slice_of("s6", "d", [endpoint("fd00::1", uid="pod-1"), endpoint("fd00::0:2", uid="pod-2")], addressType="IPv6"),
    )
    assert [one.address for one in found] == ["tcp://10.0.0.1:7001", "tcp://[fd00::2]:7001"]


def test_what_cannot_be_an_address_is_left_out() -> None:
    bad = [
        endpoint("10.0.0.1:80"),
        endpoint(""),
        {"addresses": []},
        {"addresses": None},
        endpoint("a b"),
        endpoint("*"),
    ]
    assert endpoints_of(slice_of("s", "d", bad)) == []
    assert endpoints_of(slice_of("s", "d", None, ports=None)) == []
    assert endpoints_of(slice_of("s", "d", [endpoint("10.0.0.1")], ports=[{"name": "control", "port": 99999}])) == []


def test_a_service_without_a_control_port_is_named() -> None:
    store = SliceStore({"d": "decode"})
    store.put(slice_of("s", "d", [endpoint("10.0.0.1")], ports=[{"name": "http", "port": 80}]))
    assert (store.endpoints(), store.portless()) == ((), ["d"])


def test_a_slice_that_changes_its_service_is_gone() -> None:
    store = SliceStore({"d": "decode"})
    store.put(slice_of("s", "d", [endpoint("10.0.0.1")]))
    store.put(slice_of("s", "other", [endpoint("10.0.0.1")]))
    assert store.endpoints() == ()

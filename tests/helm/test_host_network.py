"""Workers on the host network: pods of several pools share a node, and policies cannot select them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from .chart import CONTROL, Object, Refused, Rendered, containers, ports_of, render, settings_of

pytestmark = pytest.mark.helm

HOST: dict[str, Any] = {"hostNetwork": True}


def ports_in(rendered: Rendered, deployment: Object) -> dict[str, int]:
    """The ports at which a pool's workers listen."""
    settings = settings_of(rendered, deployment)
    names = {"control": "port", "kv": "kv_port", "http": "http_port", "lend": "lend_port"}
    return {name: settings[key] for name, key in names.items() if key in settings}


def test_each_pool_listens_at_its_own_ports(helm4: Path) -> None:
    rendered = render(helm4, "rdma-nodes")
    found = {}
    for role in ("prefill", "decode"):
        deployment = rendered.named("Deployment", f"demo-diptych-{role}-default")
        pod = deployment["spec"]["template"]
        assert pod["spec"]["hostNetwork"] is True
        found[role] = ports_in(rendered, deployment)
        assert ports_of(pod) == found[role]
        service = rendered.named("Service", f"demo-diptych-{role}-default")["spec"]
        assert {port["targetPort"] for port in service["ports"]} == found[role].keys()
        assert {each["image"].rpartition(":")[2] for each in containers(pod)} == {"0.1.0-cuda-nixl"}
        assert settings_of(rendered, deployment)["kv_transport"] == "nixl"
    used = [port for ports in found.values() for port in ports.values()]
    assert len(used) == len(set(used)) == 7 and all(20000 <= port < 30000 for port in used)
    (test,) = rendered.of("Pod")
    assert {f"--{role}=demo-diptych-{role}-default:{ports['http']}" for role, ports in found.items()} <= {
        *test["spec"]["containers"][0]["args"]
    }
    opened = {
        role: {port["port"] for rule in policy_of(rendered, role) for port in rule["ports"]} & set(used)
        for role in ("router", "test", "prefill", "decode")
    }
    peers = {found["decode"]["kv"], *(ports["lend"] for ports in found.values())}
    assert opened == {
        "router": {ports["control"] for ports in found.values()},
        "test": {ports["http"] for ports in found.values()},
        "prefill": peers,
        "decode": peers,
    }


def policy_of(rendered: Rendered, role: str) -> list[Object]:
    """Egress rules that open ports at any address."""
    rules = rendered.named("NetworkPolicy", f"demo-diptych-{role}")["spec"]["egress"]
    return [rule for rule in rules if "to" not in rule]


@pytest.mark.slow
def test_ports_may_be_chosen_and_are_those_of_both_roles(helm4: Path) -> None:
    over = {
        "discovery": {"type": "dns"},
        "networkPolicy": {"nodeCIDRs": ["10.1.0.0/16"]},
        "workers": {**HOST, "settings": {"role_change": True}},
        "decode": {"pools": {"default": {"hostPort": 7100}}},
    }
    rendered = render(helm4, over=over)
    text = rendered.named("ConfigMap", "demo-diptych-decode-default")["data"]["diptych.toml"]
    for section in tomllib.loads(text).values():
        assert (section["port"], section["http_port"], section["lend_port"]) == (7100, 7102, 7103)
    router = rendered.named("Deployment", "demo-diptych-router-smollm2-135m")
    assert settings_of(rendered, router)["decode_services"] == ["demo-diptych-decode-default.llm.svc:7100"]
    rules = rendered.named("NetworkPolicy", "demo-diptych-router")["spec"]["egress"]
    assert [rule["to"] for rule in rules if {"port": 7100, "protocol": "TCP"} in rule["ports"]] == [
        [{"ipBlock": {"cidr": "10.1.0.0/16"}}]
    ]


@pytest.mark.slow
def test_equal_ports_are_refused(helm4: Path) -> None:
    with pytest.raises(Refused, match="prefill pool default and decode pool default both use port 7104 of their nodes"):
        pools = {"prefill": 7100, "decode": 7104}
        over = {role: {"pools": {"default": {**HOST, "hostPort": port}}} for role, port in pools.items()}
        render(helm4, over=over)
    with pytest.raises(Refused, match="prefill pool default: hostPort 7100 needs hostNetwork"):
        render(helm4, over={"prefill": {"pools": {"default": {"hostPort": 7100}}}})


@pytest.mark.parametrize("cidrs", ([], ["10.1.0.0/16", "fd00::/8"]))
def test_routers_of_nodes_reach_workers_and_are_reached_by_the_test(helm4: Path, cidrs: list[str]) -> None:
    rendered = render(helm4, over={"router": HOST, "networkPolicy": {"nodeCIDRs": cidrs}})
    peers = [{"ipBlock": {"cidr": cidr}} for cidr in cidrs]
    ways = (
        ("prefill", "ingress", "from", CONTROL),
        ("decode", "ingress", "from", CONTROL),
        ("test", "egress", "to", 8000),
    )
    for role, direction, side, port in ways:
        rules = rendered.named("NetworkPolicy", f"demo-diptych-{role}")["spec"][direction]
        found = [rule.get(side, []) for rule in rules if {"port": port, "protocol": "TCP"} in rule["ports"]]
        assert peers in found and len(found) == 2

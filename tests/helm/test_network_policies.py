"""NetworkPolicies open the ways that processes use, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.config import DecodeWorkerConfig, PrefillWorkerConfig
from common.config.sources import Sources, counterpart

from .chart import CONTROL, HTTP, KV, LEND, RANKS_KV, Rendered, fits, ports_of, render

pytestmark = [pytest.mark.helm, pytest.mark.slow]


def allowed(rendered: Rendered, source: dict[str, str], target: dict[str, str], port: int) -> bool:
    """Whether the NetworkPolicies let a pod with labels `source` reach `port` of one with labels `target`."""

    def lets(direction: str, here: dict[str, str], peer: dict[str, str]) -> bool:
        side = "from" if direction == "ingress" else "to"
        policies = [p["spec"] for p in rendered.of("NetworkPolicy") if fits(p["spec"]["podSelector"], here)]
        if not policies:
            return True
        for rule in (rule for policy in policies for rule in policy[direction]):
            peers = rule.get(side)
            named = peers is None or any(
                "podSelector" in each and "namespaceSelector" not in each and fits(each["podSelector"], peer)
                for each in peers
            )
            ports = rule.get("ports", [{"port": 1, "endPort": 65535}])
            if named and any(each["port"] <= port <= each.get("endPort", each["port"]) for each in ports):
                return True
        return False

    return lets("egress", source, target) and lets("ingress", target, source)


def test_network_policies_open_exactly_the_ways_that_are_used(rendered: Rendered) -> None:
    roles: dict[str, dict[str, str]] = {}
    for _, pod in rendered.pods():
        roles.setdefault(pod["metadata"]["labels"]["app.kubernetes.io/component"], pod["metadata"]["labels"])
    used = {port for _, pod in rendered.pods() for port in ports_of(pod).values()}
    kv = RANKS_KV if RANKS_KV in used else KV
    ways = {
        (source, target, port)
        for source in roles
        for target in roles
        for port in (8000, CONTROL, KV, HTTP, LEND, RANKS_KV)
        if allowed(rendered, roles[source], roles[target], port)
    }
    assert ways == {
        ("router", "prefill", CONTROL),
        ("router", "decode", CONTROL),
        ("prefill", "decode", kv),
        ("decode", "decode", kv),
        *((source, target, LEND) for source in ("prefill", "decode") for target in ("prefill", "decode")),
        ("test", "router", 8000),
        ("test", "prefill", HTTP),
        ("test", "decode", HTTP),
    }
    assert used == {8000, CONTROL, kv, HTTP, LEND}


def test_workers_that_change_their_role_know_the_other_one_and_get_kv_in_both(helm4: Path, tmp_path: Path) -> None:
    over = {
        "workers": {"settings": {"role_change": True}},
        "decode": {"defaults": {"settings": {"max_num_seqs": 7}}},
        "prefill": {"defaults": {"settings": {"max_num_seqs": 5}}},
    }
    rendered = render(helm4, over=over)
    found = {}
    for deployment in rendered.of("Deployment"):
        role = deployment["metadata"]["labels"]["app.kubernetes.io/component"]
        if role == "router":
            continue
        file = tmp_path / f"{role}.toml"
        file.write_text(rendered.named("ConfigMap", deployment["metadata"]["name"])["data"]["diptych.toml"])
        mine, other = (PrefillWorkerConfig, DecodeWorkerConfig)[:: 1 if role == "prefill" else -1]
        config = mine(**Sources.open(str(file), {}, mine).values(mine) | {"config": str(file)})
        found[role] = counterpart(config, other, {})
        assert ports_of(deployment["spec"]["template"])["kv"] == KV
    assert found["prefill"].max_num_seqs == 7 and found["prefill"].kv_port == KV
    assert found["decode"].max_num_seqs == 5
    labels = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod["metadata"]["labels"]
        for _, pod in rendered.pods()
    }
    for source in ("prefill", "decode"):
        for target in ("prefill", "decode"):
            assert allowed(rendered, labels[source], labels[target], KV)


def test_network_policies_know_the_cluster_s_ports(helm4: Path) -> None:
    """Policies see a connection after the Service's address was translated, so ports are those of the pods."""
    ports = {"dnsPorts": [53, 5353], "apiServerPorts": [16443], "hubPorts": [3128]}
    policy = render(helm4, over={"networkPolicy": ports}).named("NetworkPolicy", "demo-diptych-router")
    open_to_all = [
        (port["protocol"], port["port"])
        for rule in policy["spec"]["egress"]
        if "to" not in rule
        for port in rule["ports"]
    ]
    assert open_to_all == [
        *(("UDP", 53), ("TCP", 53), ("UDP", 5353), ("TCP", 5353)),
        *(("TCP", 16443), ("TCP", 3128)),
    ]


def test_rules_may_be_added(helm4: Path) -> None:
    rule = {"ports": [{"port": 9000, "protocol": "TCP"}]}
    rendered = render(helm4, over={"networkPolicy": {"extraIngress": [rule], "extraEgress": [rule]}})
    found = {
        item["metadata"]["name"].rpartition("-")[2]: [rule in item["spec"][way] for way in ("ingress", "egress")]
        for item in rendered.of("NetworkPolicy")
    }
    assert found == {**dict.fromkeys(("router", "prefill", "decode"), [True, True]), "test": [False, False]}


def test_routers_may_send_traces_where_they_are_told_to(helm4: Path) -> None:
    """The chart opens the port of the traces only for routers, and only if their endpoint is set."""

    def rules(over: dict[str, Any], role: str) -> list[Any]:
        policy = render(helm4, over=over).named("NetworkPolicy", f"demo-diptych-{role}")
        return [rule for rule in policy["spec"]["egress"] if {"port": 4318, "protocol": "TCP"} in rule["ports"]]

    told = {"router": {"settings": {"otlp_traces_endpoint": "http://collector:4318/v1/traces"}}}
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "tracing"}}}]
    assert rules(told, "router") == [{"ports": [{"port": 4318, "protocol": "TCP"}]}]
    assert rules(told | {"networkPolicy": {"collectors": peers}}, "router")[0]["to"] == peers
    assert not rules(told, "prefill") and not rules({}, "router")

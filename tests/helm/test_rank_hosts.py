"""Pools whose workers are spread over several pods: a LeaderWorkerSet, and what leads to its pods."""

from __future__ import annotations

import copy
import difflib
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import DecodeWorkerConfig, PrefillWorkerConfig, RankHostConfig
from common.config.sources import Sources

from .chart import KUBERNETES, OPERATORS, Object, Refused, Rendered, containers, ports_of, render
from .test_network_policies import allowed
from .test_objects import GOLDEN
from .test_render import check_schemas

pytestmark = pytest.mark.helm


# The fields of a LeaderWorkerSet, as its API defines them, and the pods inside it as Kubernetes does.
#
# From kubernetes-sigs/lws, api/leaderworkerset/v1/leaderworkerset_types.go at 024af0845195be26fb4a0847c37d7209849d69da.

POD = "a template"
COUNT = "a whole number"
SHARE = "a whole number or a percentage"
POLICIES = ("Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None")
SPEC: Object = {
    "replicas": COUNT,
    "startupPolicy": ("LeaderCreated", "LeaderReady"),
    "rolloutStrategy": {
        "type": ("RollingUpdate",),
        "rollingUpdateConfiguration": {"partition": COUNT, "maxUnavailable": SHARE, "maxSurge": SHARE},
    },
    "networkConfig": {"subdomainPolicy": ("Shared", "UniquePerReplica")},
    "leaderWorkerTemplate": {
        "leaderTemplate": POD,
        "workerTemplate": POD,
        "size": COUNT,
        "restartPolicy": POLICIES,
        "subGroupPolicy": {"subGroupPolicyType": ("LeaderWorker", "LeaderExcluded"), "subGroupSize": COUNT},
    },
}


def problems_of_set(item: Object, kubernetes: str) -> list[str]:
    """What the API server would refuse of a LeaderWorkerSet."""
    template = item["spec"].get("leaderWorkerTemplate", {})
    missing = [] if "workerTemplate" in template else ["spec.leaderWorkerTemplate.workerTemplate is missing"]
    extra = [f"{name} is no field" for name in item.keys() - {"apiVersion", "kind", "metadata", "spec"}]
    return missing + extra + _problems(item["spec"], SPEC, "spec", kubernetes)


def _problems(value: object, wanted: object, where: str, kubernetes: str) -> list[str]:
    if isinstance(wanted, dict):
        if not isinstance(value, dict):
            return [f"{where} is no object"]
        found = [f"{where}.{name} is no field" for name in value if name not in wanted]
        for name in value.keys() & wanted.keys():
            found += _problems(value[name], wanted[name], f"{where}.{name}", kubernetes)
        return found
    if wanted == POD:
        import kubernetes_validate  # two seconds, which no other test should wait for

        try:
            kubernetes_validate.validate(_template(value), kubernetes, strict=True)
        except kubernetes_validate.ValidationError as error:
            return [f"{where}: {error.message}"]
        return []
    if isinstance(wanted, tuple):
        return [] if value in wanted else [f"{where} is {value!r}, none of {wanted}"]
    is_share = wanted == SHARE and isinstance(value, str) and value.removesuffix("%").isdigit() and value.endswith("%")
    return [] if type(value) is int or is_share else [f"{where} is {value!r}, not {wanted}"]


def _template(value: object) -> Object:
    return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": value}


LWS = "leaderworkerset.x-k8s.io/v1"
APIS = (*OPERATORS, LWS)
RANKS = 7005
DECODE = "demo-diptych-decode-default"
WORKERS: dict[str, Any] = {"engine": "vllm", "accelerator": {"vendor": "nvidia"}}
SPREAD: dict[str, Any] = {"tensorParallelSize": 4, "rankHosts": 2, "settings": {"kv_memory_gib": 20}}


def spread(helm: Path, **more: Any) -> Rendered:
    return render(helm, over={"workers": WORKERS, "decode": {"pools": {"default": SPREAD | more}}}, apis=APIS)


def templates(item: Object) -> tuple[Object, Object]:
    """Of the leader, and of the other pods of its group."""
    template = item["spec"]["leaderWorkerTemplate"]
    return template["leaderTemplate"], template["workerTemplate"]


@pytest.mark.slow
@pytest.mark.parametrize("kubernetes", KUBERNETES)
def test_the_set_is_what_its_api_takes(helm4: Path, kubernetes: str) -> None:
    rendered = render(helm4, "several-hosts", kubernetes=kubernetes, apis=APIS)
    sets = rendered.of("LeaderWorkerSet")
    assert [item["metadata"]["name"] for item in sets] == ["demo-diptych-prefill-default", DECODE]
    for item in sets:
        assert problems_of_set(item, kubernetes) == []
    others = [item for item in rendered.objects if item["kind"] != "LeaderWorkerSet"]
    assert check_schemas(Rendered("", others), kubernetes) >= 15


@pytest.mark.slow
def test_a_misspelt_field_would_be_found(helm4: Path) -> None:
    wrong = copy.deepcopy(spread(helm4).named("LeaderWorkerSet", DECODE))
    wrong["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Never"
    wrong["spec"]["leaderWorkerTemplate"]["sizes"] = wrong["spec"]["leaderWorkerTemplate"].pop("size")
    wrong["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]["maxSurge"] = "many"
    wrong["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["comand"] = []
    del wrong["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    assert len(problems_of_set(wrong, KUBERNETES[-1])) == 4
    del wrong["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    assert "spec.leaderWorkerTemplate.workerTemplate is missing" in problems_of_set(wrong, KUBERNETES[-1])


@pytest.mark.slow
def test_a_group_has_the_devices_and_the_model_of_each_host(helm4: Path, tmp_path: Path) -> None:
    rendered = spread(helm4, replicas=3)
    item = rendered.named("LeaderWorkerSet", DECODE)
    assert item["spec"]["replicas"] == 3 and item["spec"]["leaderWorkerTemplate"]["size"] == 2
    assert not [each for each in rendered.of("Deployment") if "decode" in each["metadata"]["name"]]
    leader, other = templates(item)
    for pod in (leader, other):
        assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
        assert [each["name"] for each in pod["spec"]["initContainers"]] == ["fetch-model"]
        assert all(each["securityContext"]["capabilities"] == {"drop": ["ALL"]} for each in containers(pod))
    same = ("terminationGracePeriodSeconds", "volumes", "initContainers", "securityContext")
    assert all(leader["spec"][name] == other["spec"][name] for name in same)
    assert ports_of(leader)["ranks"] == RANKS and not ports_of(other)
    file = tmp_path / "diptych.toml"
    file.write_text(rendered.named("ConfigMap", DECODE)["data"]["diptych.toml"])
    worker = DecodeWorkerConfig(**Sources.open(str(file), {}, DecodeWorkerConfig).values(DecodeWorkerConfig))
    assert (worker.tensor_parallel_size, worker.rank_hosts, worker.rank_port) == (4, 2, RANKS)
    (container,) = other["spec"]["containers"]
    assert container["command"] == ["diptych", "rank-host"]
    assert container["args"][-1] == f"--leader=$(LWS_LEADER_ADDRESS):{RANKS}"
    host = RankHostConfig(**Sources.open(str(file), {}, RankHostConfig).values(RankHostConfig))
    assert host.log_json


@pytest.mark.slow
def test_both_sides_prove_themselves_with_the_key_of_the_cluster(helm4: Path) -> None:
    rendered = render(helm4, "several-hosts", apis=APIS)
    table = tomllib.loads(rendered.named("ConfigMap", DECODE)["data"]["diptych.toml"])
    assert table["rank_host"]["curve_key"] == table["decode_worker"]["curve_key"]
    for pod in templates(rendered.named("LeaderWorkerSet", DECODE)):
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
        assert table["rank_host"]["curve_key"].startswith(mounts["curve"])


@pytest.mark.slow
def test_only_leaders_are_workers(helm4: Path) -> None:
    """To Services, and so to routers; monitors look for a port that other pods do not have."""
    rendered = spread(helm4)
    leader, other = (pod["metadata"]["labels"] for pod in templates(rendered.named("LeaderWorkerSet", DECODE)))
    selector = rendered.named("Service", DECODE)["spec"]["selector"]
    assert selector.items() <= leader.items() and not selector.items() <= other.items()
    assert other["app.kubernetes.io/component"] == "decode-ranks"
    assert {name: value for name, value in leader.items() if other[name] != value} == {
        "app.kubernetes.io/component": "decode"
    }


@pytest.mark.slow
def test_pods_of_a_pool_reach_each_other_and_no_stranger_reaches_them(helm4: Path) -> None:
    rendered = spread(helm4)
    leader, other = (pod["metadata"]["labels"] for pod in templates(rendered.named("LeaderWorkerSet", DECODE)))
    (router,) = (item for item in rendered.of("Deployment") if "router" in item["metadata"]["name"])
    (policy,) = (item for item in rendered.of("NetworkPolicy") if item["metadata"]["name"] == f"{DECODE}-ranks")
    (expression,) = policy["spec"]["podSelector"]["matchExpressions"]
    assert expression == {"key": "app.kubernetes.io/component", "operator": "In", "values": ["decode", "decode-ranks"]}
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= leader.items() & other.items()
    assert policy["spec"]["ingress"][0] == {"from": [{"podSelector": policy["spec"]["podSelector"]}]}
    assert policy["spec"]["egress"][0] == {"to": [{"podSelector": policy["spec"]["podSelector"]}]}
    stranger = router["spec"]["template"]["metadata"]["labels"]
    others = [item for item in rendered.of("NetworkPolicy") if item is not policy]
    assert not allowed(Rendered("", others), stranger, leader, RANKS)


@pytest.mark.slow
def test_one_budget_holds_all_pods_of_a_pool(helm4: Path) -> None:
    """With minAvailable of workers: whichever pod goes takes a worker with it."""
    budget = spread(helm4, replicas=3, pdb={"enabled": True, "minAvailable": 2}).named("PodDisruptionBudget", DECODE)
    assert budget["spec"]["minAvailable"] == 4
    assert budget["spec"]["selector"]["matchExpressions"][0]["values"] == ["decode", "decode-ranks"]
    plain = spread(helm4).named("PodDisruptionBudget", DECODE)
    assert plain["spec"]["maxUnavailable"] == 1


@pytest.mark.slow
def test_what_scales_names_the_set(helm4: Path) -> None:
    for scaling in ({"type": "hpa", "target": 0.9}, {"type": "keda", "target": 0.9}):
        (found,) = spread(helm4, autoscaling=scaling).of("HorizontalPodAutoscaler", "ScaledObject")
        assert found["spec"]["scaleTargetRef"] == {"apiVersion": LWS, "kind": "LeaderWorkerSet", "name": DECODE}
    rendered = spread(helm4, autoscaling={"type": "planner", "maxReplicas": 4})
    assert "replicas" not in rendered.named("LeaderWorkerSet", DECODE)["spec"]
    (role,) = (item for item in rendered.of("Role") if item["metadata"]["name"].endswith("-router"))
    (rule,) = (rule for rule in role["rules"] if rule["apiGroups"] == ["leaderworkerset.x-k8s.io"])
    assert (rule["resources"], rule["resourceNames"], rule["verbs"]) == (
        ["leaderworkersets/scale"],
        [DECODE],
        ["get", "patch"],
    )
    assert not [rule for rule in role["rules"] if rule["apiGroups"] == ["apps"]]
    (router,) = (item for item in rendered.of("ConfigMap") if "-router-" in item["metadata"]["name"])
    settings = tomllib.loads(router["data"]["diptych.toml"])["router"]
    assert settings["decode_deployment"] == f"leaderworkersets/{DECODE}"


@pytest.mark.slow
def test_ranks_of_vllm_exchange_kv_from_all_pods(helm4: Path) -> None:
    """Other workers reach nothing else of the pods that have no worker process."""
    rendered = render(helm4, "several-hosts", apis=APIS)
    pods = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod["metadata"]["labels"]
        for item in rendered.of("LeaderWorkerSet")
        for pod in templates(item)
    }
    ways = {
        (source, target)
        for source in pods
        for target in pods
        for port in (7010, 7025)
        if source.split("-")[0] != target.split("-")[0] and allowed(rendered, pods[source], pods[target], port)
    }
    assert ways == {
        (source, target) for source in ("prefill", "prefill-ranks") for target in ("decode", "decode-ranks")
    }
    assert not allowed(rendered, pods["prefill-ranks"], pods["decode-ranks"], 7026)
    assert not allowed(rendered, pods["prefill-ranks"], pods["decode"], 7001)


def test_what_cannot_be_spread_is_refused(helm4: Path) -> None:
    wanted = "4 is not divisible by rankHosts 3, but each host runs the same number of ranks: use 1, 2, 4"
    with pytest.raises(Refused, match=wanted):
        spread(helm4, rankHosts=3)
    with pytest.raises(Refused, match="decode pool default with rankHosts 2 needs the API leaderworkerset.x-k8s.io/v1"):
        render(helm4, over={"workers": WORKERS, "decode": {"pools": {"default": SPREAD}}})
    with pytest.raises(Refused, match="rankHosts is 2, but only workers with engine vllm run in several pods"):
        render(helm4, over={"workers": {"tensorParallelSize": 2, "rankHosts": 2}}, apis=APIS)


@pytest.mark.slow
def test_a_prefill_pool_is_spread_too(helm4: Path, tmp_path: Path) -> None:
    rendered = render(helm4, over={"workers": WORKERS, "prefill": {"pools": {"default": SPREAD}}}, apis=APIS)
    leader, other = templates(rendered.named("LeaderWorkerSet", "demo-diptych-prefill-default"))
    assert leader["spec"]["containers"][0]["command"] == ["diptych", "prefill-worker"]
    assert other["metadata"]["labels"]["app.kubernetes.io/component"] == "prefill-ranks"
    file = tmp_path / "diptych.toml"
    file.write_text(rendered.named("ConfigMap", "demo-diptych-prefill-default")["data"]["diptych.toml"])
    values = Sources.open(str(file), {}, PrefillWorkerConfig).values(PrefillWorkerConfig)
    assert PrefillWorkerConfig(**values).ranks_per_host == 2


def test_golden(helm4: Path) -> None:
    """Written anew as the others are: see `test_objects.test_golden`."""
    rendered = render(helm4, "several-hosts", apis=APIS)
    kept = [item for item in rendered.objects if not item["metadata"]["name"].startswith("demo-diptych-dashboard-")]
    text = yaml.dump_all(kept, Dumper=yaml.CSafeDumper, sort_keys=True, width=120)
    file = GOLDEN / "several-hosts.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    lines = difflib.unified_diff(file.read_text(encoding="utf-8").splitlines(), text.splitlines(), lineterm="", n=2)
    assert not (changed := list(lines)), "\n".join(changed[:60])

"""What operators add to pods or take from them: contexts, places, volumes, containers, devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .chart import LAYOUT, Object, Refused, Rendered, containers, render, settings_of
from .test_render import check_schemas

pytestmark = [pytest.mark.helm, pytest.mark.slow]

ROUTER, PREFILL, DECODE = (
    f"demo-diptych-{name}" for name in ("router-smollm2-135m", "prefill-default", "decode-default")
)
NO_IDS = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy"))
EXTRA: dict[str, Any] = {
    "annotations": {"reloader.example.com/auto": "true"},
    "labels": {"kueue.x-k8s.io/queue-name": "llm", "app.kubernetes.io/name": "other"},
    "envFrom": [{"prefix": "HUB_", "secretRef": {"name": "proxy"}}],
    "hostAliases": [{"ip": "10.1.2.3", "hostnames": ["hub.example.com"]}],
    "extraVolumes": [{"name": "rdma", "hostPath": {"path": "/dev/infiniband"}}],
    "extraVolumeMounts": [{"name": "rdma", "mountPath": "/dev/infiniband"}],
    "initContainers": [{"name": "before", "image": "registry.example.com/before:1"}],
    "sidecars": [{"name": "beside", "image": "registry.example.com/beside:1"}],
    "schedulerName": "kueue",
    "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
    "hostNetwork": True,
    "dnsConfig": {"options": [{"name": "ndots", "value": "2"}]},
}


def spec_of(rendered: Rendered, name: str) -> Object:
    found: Object = rendered.named("Deployment", name)["spec"]["template"]["spec"]
    return found


def test_ids_go_and_the_root_may_be_written_where_a_pool_says_so(either_helm: Path) -> None:
    """OpenShift's restricted-v2 refuses pods that name ids; nvidia-cdi-hook writes into the container."""
    pool = {"podSecurityContext": NO_IDS, "securityContext": {"readOnlyRootFilesystem": False}}
    rendered = render(either_helm, over={"decode": {"pools": {"default": pool}}})
    context = spec_of(rendered, DECODE)["securityContext"]
    assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    for container in containers(rendered.named("Deployment", DECODE)["spec"]["template"]):
        assert container["securityContext"]["readOnlyRootFilesystem"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    for name in (ROUTER, PREFILL):
        assert spec_of(rendered, name)["securityContext"]["runAsUser"] == 10001
        assert spec_of(rendered, name)["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_openshift_example_names_no_id(helm4: Path) -> None:
    rendered = render(helm4, "openshift")
    for _, pod in rendered.pods():
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & pod["spec"]["securityContext"].keys()
    (route,) = rendered.of("Route")
    assert route["spec"]["to"]["name"] in {item["metadata"]["name"] for item in rendered.of("Service")}


@pytest.mark.parametrize("role", ["router", "workers"])
def test_pods_take_what_operators_add(helm4: Path, role: str) -> None:
    names = [ROUTER] if role == "router" else [PREFILL, DECODE]
    rendered = render(helm4, over={role: EXTRA | {"resources": {"claims": [{"name": "gpu"}]}}})
    assert check_schemas(rendered, "1.37") >= 15
    for name in names:
        deployment, spec = rendered.named("Deployment", name), spec_of(rendered, name)
        assert deployment["metadata"]["annotations"] == EXTRA["annotations"]
        labels = deployment["metadata"]["labels"], deployment["spec"]["template"]["metadata"]["labels"]
        assert [each.get("kueue.x-k8s.io/queue-name") for each in labels] == ["llm", None]
        assert {each["app.kubernetes.io/name"] for each in labels} == {"diptych"}, "a selector label was overridden"
        assert spec["hostAliases"] == EXTRA["hostAliases"]
        assert EXTRA["extraVolumes"][0] in spec["volumes"]
        assert [each["name"] for each in spec["initContainers"]] == ["before", "fetch-model"]
        assert [each["name"] for each in spec["containers"]][1:] == ["beside"]
        for container in (spec["initContainers"][1], spec["containers"][0]):
            assert EXTRA["extraVolumeMounts"][0] in container["volumeMounts"]
            assert container["envFrom"] == EXTRA["envFrom"]
        assert spec["containers"][0]["resources"]["claims"] == [{"name": "gpu"}]
        assert (spec["schedulerName"], spec["resourceClaims"]) == ("kueue", EXTRA["resourceClaims"])
        assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
        assert spec["dnsConfig"] == EXTRA["dnsConfig"]
    others = {ROUTER, PREFILL, DECODE} - set(names)
    assert not any("schedulerName" in spec_of(rendered, name) for name in others)


def test_a_load_balancer_has_its_class_and_policy(helm4: Path) -> None:
    service = {
        "type": "LoadBalancer",
        "loadBalancerClass": "eks.amazonaws.com/nlb",
        "externalTrafficPolicy": "Local",
        "loadBalancerSourceRanges": ["10.0.0.0/8", "fd00::/8"],
    }
    rendered = render(helm4, over={"router": {"service": {**service, "nodePort": 30080}}})
    found = rendered.named("Service", ROUTER)["spec"]
    assert {key: found[key] for key in service} == service and check_schemas(rendered, "1.37") >= 15
    assert [port["nodePort"] for port in found["ports"]] == [30080]


def test_a_spread_over_domains_keeps_its_policies(helm4: Path) -> None:
    spread = {
        "topologyKey": "zone",
        "maxSkew": 2,
        "whenUnsatisfiable": "DoNotSchedule",
        "minDomains": 3,
        "nodeTaintsPolicy": "Honor",
    }
    rendered = render(helm4, over={"workers": {"topologySpread": [spread]}})
    (found,) = spec_of(rendered, DECODE)["topologySpreadConstraints"]
    assert spread.items() <= found.items() and check_schemas(rendered, "1.37") >= 15
    with pytest.raises(Refused, match="whenUnsatisfiable"):
        render(helm4, over={"workers": {"topologySpread": [{"topologyKey": "zone", "minDomains": 3}]}})


def test_every_process_trusts_the_authorities_it_is_given(helm4: Path) -> None:
    rendered = render(helm4, over={"trustedCA": {"configMap": "corporate", "key": "all.crt"}})
    for name in (ROUTER, PREFILL, DECODE):
        spec = spec_of(rendered, name)
        assert {"name": "trusted-ca", "configMap": {"name": "corporate"}} in spec["volumes"]
        for container in (*spec["initContainers"], *spec["containers"]):
            values = {each["name"]: each.get("value") for each in container["env"]}
            (mount,) = [each for each in container["volumeMounts"] if each["name"] == "trusted-ca"]
            for variable in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
                assert values[variable] == f"{mount['mountPath']}/all.crt"


def test_further_objects_are_filled_in(helm4: Path) -> None:
    whole = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-a"}, "data": {"n": "1"}}
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {{ .Release.Name }}-b\n"
    rendered = render(helm4, over={"extraObjects": [whole, text]})
    assert rendered.named("ConfigMap", "demo-a")["data"] == {"n": "1"}
    assert rendered.named("ConfigMap", "demo-b")


def test_a_pool_drops_what_it_would_inherit(either_helm: Path) -> None:
    over = {
        "workers": {
            "nodeSelector": {"gpu": "h100", "zone": "a"},
            "resources": {"limits": {"cpu": "4", "memory": "8Gi"}},
            "podAnnotations": {"scrape": "yes"},
        },
        "decode": {
            "pools": {
                "default": {
                    "nodeSelector": {"gpu": None},
                    "resources": {"limits": {"cpu": None}},
                    "podAnnotations": {"scrape": None},
                }
            }
        },
    }
    rendered = render(either_helm, over=over)
    spec = spec_of(rendered, DECODE)
    assert spec["nodeSelector"] == {"zone": "a"}
    assert spec["containers"][0]["resources"]["limits"] == {"memory": "8Gi"}
    assert "scrape" not in rendered.named("Deployment", DECODE)["spec"]["template"]["metadata"]["annotations"]
    assert spec_of(rendered, PREFILL)["nodeSelector"] == {"gpu": "h100", "zone": "a"}


TERM = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}}
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def test_places_are_typed(helm4: Path) -> None:
    """`kye` in a toleration passed, and the pod stayed pending."""
    for wrong, message in (
        ({"tolerations": [{"kye": "gpu", "operator": "Exists"}]}, "kye"),
        ({"tolerations": [{"key": "gpu", "effect": "NoShedule"}]}, "effect"),
        ({"affinity": {"podAntiAfinity": {}}}, "podAntiAfinity"),
        ({"affinity": {"podAntiAffinity": {PREFERRED: [{"podAffinityTerm": TERM}]}}}, "weight"),
        ({"dnsConfig": {"nameserver": ["10.0.0.1"]}}, "nameserver"),
        ({"extraVolumeMounts": [{"name": "a"}]}, "mountPath"),
    ):
        with pytest.raises(Refused, match=message):
            render(helm4, over={"workers": wrong})
    right = {"podAntiAffinity": {PREFERRED: [{"weight": 5, "podAffinityTerm": TERM}]}}
    tolerations = [{"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}]
    rendered = render(helm4, over={"workers": {"affinity": right, "tolerations": tolerations}})
    assert spec_of(rendered, DECODE)["affinity"] == right and check_schemas(rendered, "1.37") >= 15


def test_a_worker_asks_for_one_device_or_none(helm4: Path) -> None:
    """Eight GPUs for a worker that computes on one would leave seven idle."""
    eight = {"replicas": 2, "accelerator": {"vendor": "nvidia", "count": 8}}
    with pytest.raises(Refused, match="count is 8, .* set count 1, and replicas 16 or tensorParallelSize 8"):
        render(helm4, over={"decode": {"pools": {"default": eight}}})
    claimed = {"accelerator": {"vendor": "nvidia", "count": 0}}
    rendered = render(helm4, over={"workers": LAYOUT, "decode": {"pools": {"default": claimed}}})
    assert "nvidia.com/gpu" not in spec_of(rendered, DECODE)["containers"][0]["resources"]["limits"]


def test_a_worker_of_several_ranks_asks_for_as_many_devices(helm4: Path) -> None:
    ranks = {"tensorParallelSize": 4, "accelerator": {"vendor": "nvidia"}}
    rendered = render(helm4, over={"workers": LAYOUT, "decode": {"pools": {"default": ranks}}})
    assert spec_of(rendered, DECODE)["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 4
    decode, prefill = (settings_of(rendered, rendered.named("Deployment", name)) for name in (DECODE, PREFILL))
    assert decode["tensor_parallel_size"] == 4
    assert "tensor_parallel_size" not in prefill


@pytest.mark.parametrize(
    ("role", "part"),
    (
        ("workers", {"pdb": {"minAvailable": 1}}),
        ("workers", {"replicas": 2, "pdb": {"minAvailable": "100%"}}),
        ("workers", {"pdb": {"maxUnavailable": 0}}),
        ("workers", {"pdb": {"minAvailable": 2}, "autoscaling": {"type": "hpa", "minReplicas": 2}}),
        ("router", {"replicas": 2, "pdb": {"minAvailable": 2}}),
    ),
)
def test_a_budget_that_lets_no_pod_go_is_refused(helm4: Path, role: str, part: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="allows no eviction, so no node with one of them could ever be drained"):
        render(helm4, over={role: part})


def test_a_budget_that_lets_some_go_is_made(helm4: Path) -> None:
    over = {"workers": {"replicas": 3, "pdb": {"minAvailable": 2}}, "router": {"replicas": 0}}
    assert render(helm4, over=over).named("PodDisruptionBudget", DECODE)["spec"]["minAvailable"] == 2


def test_a_worker_may_change_nothing_of_its_pod_but_the_cost(helm4: Path) -> None:
    """A finalizer keeps a pod for ever, an owner reference has it deleted with something else."""
    (policy,) = render(helm4, over={"podDeletionCost": {"enabled": True}}).of("ValidatingAdmissionPolicy")
    rules = " ".join(rule["expression"] for rule in policy["spec"]["validations"])
    for part in ("metadata.finalizers", "metadata.ownerReferences", "metadata.labels"):
        assert f"(has(object.{part}) ? object.{part}" in rules and f"(has(oldObject.{part}) ? oldObject.{part}" in rules
    assert "object.spec == oldObject.spec" in rules and "variables.after.all" in rules

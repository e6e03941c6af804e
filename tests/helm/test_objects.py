"""What one rendered object says of another is true, and every pod is as confined as it can be."""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import CONFIG_CLASSES, RouterConfig
from common.config.field import fields_of
from common.config.sources import Sources

from .chart import (
    CONTROL,
    HTTP,
    KV,
    LAYOUT,
    LEND,
    RANKS_KV,
    Rendered,
    containers,
    matched,
    ports_of,
    render,
    settings_of,
)

pytestmark = pytest.mark.helm

GOLDEN = Path(__file__).with_name("golden")
SAFE_VOLUMES = {"configMap", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
MARGIN_S = 15


def test_golden(rendered: Rendered, request: pytest.FixtureRequest) -> None:
    """UPDATE_GOLDEN=1 pytest tests/helm/test_objects.py writes them anew; the diff is what a release changes."""
    kept = [item for item in rendered.objects if not item["metadata"]["name"].startswith("demo-diptych-dashboard-")]
    text = yaml.dump_all(kept, Dumper=yaml.CSafeDumper, sort_keys=True, width=120)
    file = GOLDEN / f"{request.node.callspec.id}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    lines = difflib.unified_diff(file.read_text(encoding="utf-8").splitlines(), text.splitlines(), lineterm="", n=2)
    assert not (changed := list(lines)), "\n".join(changed[:60])


@pytest.mark.slow_cases("default")
def test_object_names_are_unique_and_everything_is_in_the_namespace(rendered: Rendered) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in rendered.objects]
    assert len(names) == len(set(names))
    assert all(len(name) <= 63 for kind, name in names if kind != "ValidatingAdmissionPolicy")
    cluster_wide = {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    assert {item["metadata"].get("namespace") for item in rendered.objects if item["kind"] not in cluster_wide} == {
        "llm"
    }


def test_deployments_select_their_own_pods_and_no_others(rendered: Rendered) -> None:
    for deployment in rendered.of("Deployment"):
        found = matched(rendered, deployment["spec"]["selector"]["matchLabels"])
        assert found == [deployment["spec"]["template"]], deployment["metadata"]["name"]


def test_services_lead_to_ports_that_exist(rendered: Rendered) -> None:
    for service in rendered.of("Service"):
        pods = matched(rendered, service["spec"]["selector"])
        assert len(pods) == 1, service["metadata"]["name"]
        ports = ports_of(pods[0])
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports
            if service["spec"].get("clusterIP") == "None":  # a headless Service cannot translate ports
                assert port["port"] == ports[port["targetPort"]]


def test_worker_services_name_their_ports_as_discovery_wants_them(rendered: Rendered) -> None:
    for deployment in rendered.of("Deployment"):
        role = deployment["metadata"]["labels"]["app.kubernetes.io/component"]
        service = rendered.named("Service", deployment["metadata"]["name"])
        ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
        if role == "router":
            assert list(ports) == ["http"]
            continue
        pod = ports_of(deployment["spec"]["template"])
        kv = {"kv": RANKS_KV if pod["kv"] == RANKS_KV else KV} if role == "decode" else {}
        assert ports == {"control": CONTROL, "http": HTTP, "lend": LEND} | kv
        assert service["spec"]["publishNotReadyAddresses"] is True


def test_routers_look_for_services_that_exist(rendered: Rendered) -> None:
    services = {item["metadata"]["name"]: item for item in rendered.of("Service")}
    found: list[str] = []
    for deployment in rendered.of("Deployment"):
        if deployment["metadata"]["labels"]["app.kubernetes.io/component"] != "router":
            continue
        settings = settings_of(rendered, deployment)
        assert settings["discovery_namespace"] == deployment["metadata"]["namespace"]
        for role in ("prefill", "decode"):
            for name in settings[f"{role}_services"]:
                labels = services[name]["metadata"]["labels"]
                assert labels["app.kubernetes.io/component"] == role
                assert labels["diptych/model"] == deployment["metadata"]["labels"].get(
                    "diptych/model", labels["diptych/model"]
                )
                found.append(name)
    workers = {name for name, item in services.items() if item["spec"].get("clusterIP") == "None"}
    assert sorted(found) == sorted(workers)


def test_settings_are_what_the_processes_read(rendered: Rendered, tmp_path: Path) -> None:
    classes = {cls.section: cls for cls in CONFIG_CLASSES}
    for deployment in rendered.of("Deployment"):
        name = deployment["metadata"]["name"]
        file = tmp_path / f"{name}.toml"
        file.write_text(rendered.named("ConfigMap", name)["data"]["diptych.toml"])
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        assert container["args"] == ["--config", "/etc/diptych/config/diptych.toml"]
        section = next(iter(tomllib.loads(file.read_text())))
        cls = classes[section]
        assert container["command"] == ["diptych", section.replace("_", "-")]
        fixed = {"name": "10.0.0.1", "DIPTYCH_ADVERTISE_HOST": "10.0.0.1", "DIPTYCH_THREADS": "4"}
        names = [variable["name"] for variable in container["env"] if variable["name"].startswith("DIPTYCH_")]
        environ = {variable: fixed.get(variable, "x") for variable in names}
        values = Sources.open(str(file), environ, cls).values(cls)
        config = cls(**values)  # refuses what is out of range
        assert {field.name for field in fields_of(cls)} >= values.keys()
        assert getattr(config, "host", "") == "::"  # IPv6 and IPv4


def test_the_grace_period_covers_the_drain(rendered: Rendered) -> None:
    for deployment in rendered.of("Deployment"):
        spec = deployment["spec"]["template"]["spec"]
        pause = spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        drain = settings_of(rendered, deployment)["drain_timeout_s"]
        assert spec["terminationGracePeriodSeconds"] == pause + drain + MARGIN_S


def test_every_probe_asks_its_own_question(rendered: Rendered) -> None:
    for deployment in rendered.of("Deployment"):
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
        assert {probe["httpGet"]["port"] for name, probe in container.items() if name.endswith("Probe")} == {"http"}
        role = deployment["metadata"]["labels"]["app.kubernetes.io/component"]
        assert paths["liveness"] == "/health"
        assert paths["startup"] == ("/health" if role == "router" else "/ready")
        if role != "router":
            assert paths["readiness"] == "/ready"


@pytest.mark.slow
def test_a_router_before_empty_pools_takes_requests(helm4: Path) -> None:
    def path(rendered: Rendered) -> str:
        routers = [item for item in rendered.of("Deployment") if "-router-" in item["metadata"]["name"]]
        return str(routers[0]["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"])

    assert path(render(helm4)) == "/ready"
    assert path(render(helm4, "many-nodes")) == "/health"
    assert path(render(helm4, "many-nodes", over={"router": {"readiness": "workers"}})) == "/ready"


def test_autoscalers_and_budgets_have_targets_and_each_target_one_master(rendered: Rendered) -> None:
    deployments = {item["metadata"]["name"]: item for item in rendered.of("Deployment")}
    scaled = [item["spec"]["scaleTargetRef"]["name"] for item in rendered.of("HorizontalPodAutoscaler", "ScaledObject")]
    assert len(scaled) == len(set(scaled))
    for name, deployment in deployments.items():
        assert ("replicas" in deployment["spec"]) == (name not in scaled)
    assert set(scaled) <= set(deployments)
    budgets = rendered.of("PodDisruptionBudget")
    assert {budget["metadata"]["name"] for budget in budgets} == set(deployments)
    for budget in budgets:
        assert len(matched(rendered, budget["spec"]["selector"]["matchLabels"])) == 1
        assert ("minAvailable" in budget["spec"]) != ("maxUnavailable" in budget["spec"])


@pytest.mark.slow
@pytest.mark.parametrize("discovery", ["kubernetes", "dns"])
def test_a_router_that_plans_its_pools_has_the_rights_for_that_and_no_others(
    helm4: Path, tmp_path: Path, discovery: str
) -> None:
    scaling = {"type": "planner", "minReplicas": 0, "maxReplicas": 6}
    goals = {"source": {"id": "m"}, "slo": {"ttftMs": 500, "tpotMs": 30}}
    over = {"models": {"m": goals}, "workers": {"autoscaling": scaling}, "discovery": {"type": discovery}}
    rendered = render(helm4, over=over)
    router = rendered.named("Deployment", "demo-diptych-router-m")
    settings = settings_of(rendered, router)
    names = {role: f"demo-diptych-{role}-default" for role in ("prefill", "decode")}
    assert {role: settings[f"{role}_deployment"] for role in names} == names
    assert (settings["planner"], settings["min_decode"], settings["max_prefill"]) == ("kubernetes", 0, 6)
    assert all("replicas" not in rendered.named("Deployment", name)["spec"] for name in names.values())
    assert not rendered.of("HorizontalPodAutoscaler", "ScaledObject")
    assert router["spec"]["template"]["spec"]["automountServiceAccountToken"]
    probe = router["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"]
    assert probe == "/health", "requests wait in the router for pools at zero"
    rights = {
        (group, resource): (sorted(rule["verbs"]), rule.get("resourceNames"))
        for rule in rendered.named("Role", "demo-diptych-router")["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        if rule["verbs"] != ["create"]
    }
    slices = {("discovery.k8s.io", "endpointslices"): (["list", "watch"], None)}
    assert rights == (slices if discovery == "kubernetes" else {}) | {
        ("apps", "deployments/scale"): (["get", "patch"], sorted(names.values())),
        ("", "pods"): (["list"], None),
        ("coordination.k8s.io", "leases"): (["get", "patch"], [settings["planner_lease"]]),
    }
    way = rendered.named("NetworkPolicy", "demo-diptych-router")
    assert any(port["port"] == 6443 for rule in way["spec"]["egress"] for port in rule.get("ports", ()))
    (tmp_path / "diptych.toml").write_text(rendered.named("ConfigMap", "demo-diptych-router-m")["data"]["diptych.toml"])
    RouterConfig(**Sources.open(str(tmp_path / "diptych.toml"), {}, RouterConfig).values(RouterConfig))


def test_keda_never_scales_on_a_metric_that_is_lost(rendered: Rendered) -> None:
    for item in rendered.of("ScaledObject"):
        spec = item["spec"]
        assert spec["fallback"]["behavior"] == "currentReplicas"
        assert {trigger["name"] for trigger in spec["triggers"]} >= {"load"}
        for trigger in spec["triggers"]:
            assert all(isinstance(value, str) for value in trigger["metadata"].values())
            if trigger["type"] == "prometheus":
                assert trigger["metadata"]["ignoreNullValues"] == "false"
                assert "avg(" not in trigger["metadata"]["query"]


def test_every_pod_is_restricted(rendered: Rendered, request: pytest.FixtureRequest) -> None:
    """Kubernetes' Pod Security Standard "restricted", a user of our own and a read-only root file system.

    OpenShift chooses the user, and its GPU operator writes into GPU pods."""
    at_home = request.node.callspec.params["rendered"] != "openshift"
    for name, pod in rendered.pods():
        spec = pod["spec"]
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True and ("runAsUser" in context) == at_home, name
        assert context.get("runAsUser", 1) > 0
        assert context["seccompProfile"]["type"] == "RuntimeDefault"
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert spec["enableServiceLinks"] is False
        for container in containers(pod):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True or (not at_home and container["name"] == "worker")
            assert own["capabilities"] == {"drop": ["ALL"]} and own["runAsNonRoot"] is True
            assert not {"privileged", "procMount", "runAsUser"} & own.keys()
            assert "hostPort" not in str(container.get("ports"))
        for volume in spec["volumes"]:
            # OCI images count as safe since Kubernetes 1.33, which the chart wants for them.
            assert set(volume) - {"name"} <= SAFE_VOLUMES | {"image"}


def test_mounts_have_volumes_and_what_is_written_to_is_writable(rendered: Rendered) -> None:
    for name, pod in rendered.pods():
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounted = {mount["name"] for container in containers(pod) for mount in container["volumeMounts"]}
        assert mounted == set(volumes), name
        for container in containers(pod):
            if container["command"][0] == "diptych":
                paths = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
                assert {"/var/cache/diptych", "/tmp"} <= paths
                homes = {each["name"]: each.get("value", "") for each in container["env"]}
                assert all(homes[key].startswith("/var/cache/diptych") for key in ("HOME", "DIPTYCH_CACHE", "HF_HOME"))


def test_config_maps_that_pods_read_exist(rendered: Rendered) -> None:
    names = {item["metadata"]["name"] for item in rendered.of("ConfigMap")}
    for _, pod in rendered.pods():
        assert {v["configMap"]["name"] for v in pod["spec"]["volumes"] if "configMap" in v} <= names
    secrets = {v["secret"]["secretName"] for _, pod in rendered.pods() for v in pod["spec"]["volumes"] if "secret" in v}
    made = {item["spec"]["secretName"] for item in rendered.of("Certificate")}
    # No Secret is made by the chart but through cert-manager: the others are the user's.
    assert secrets - made <= {"diptych-api-keys", "diptych-curve"}
    assert not rendered.of("Secret")


@pytest.mark.slow
def test_a_changed_setting_rolls_the_pods(helm4: Path) -> None:
    def checksum(**settings: Any) -> str:
        rendered = render(helm4, over={"decode": {"defaults": {"settings": settings}}})
        template = rendered.named("Deployment", "demo-diptych-decode-default")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    assert checksum() == checksum()
    assert checksum() != checksum(max_num_seqs=8)


def test_rights_are_the_least_that_work(rendered: Rendered, request: pytest.FixtureRequest) -> None:
    bound = {binding["roleRef"]["name"]: binding["subjects"][0]["name"] for binding in rendered.of("RoleBinding")}
    accounts = {item["metadata"]["name"] for item in rendered.of("ServiceAccount")}
    assert set(bound.values()) <= accounts
    rights = {role["metadata"]["name"]: role["rules"] for role in rendered.of("Role")}
    expected = [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}]
    assert rights.pop("demo-diptych-router") == expected
    token_users = {
        pod["spec"]["serviceAccountName"] for _, pod in rendered.pods() if pod["spec"]["automountServiceAccountToken"]
    }
    if rights:
        assert rights == {"demo-diptych-worker": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]}
        assert rendered.of("ValidatingAdmissionPolicy")
    assert token_users == set(bound.values())
    assert not rendered.of("ClusterRole", "ClusterRoleBinding")


def test_routes_end_at_routers(rendered: Rendered) -> None:
    services = {item["metadata"]["name"]: item for item in rendered.of("Service")}
    for ingress in rendered.of("Ingress"):
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                backend = path["backend"]["service"]
                names = [port["name"] for port in services[backend["name"]]["spec"]["ports"]]
                assert backend["port"]["name"] in names
    for route in rendered.of("HTTPRoute"):
        own = [
            backend for rule in route["spec"]["rules"] for backend in rule["backendRefs"] if backend["name"] in services
        ]
        assert own and all(backend["port"] == 80 for backend in own)


@pytest.mark.slow
def test_a_gpu_pod_asks_for_its_device_and_computes_on_it(helm4: Path) -> None:
    for vendor, resource in (("nvidia", "nvidia.com/gpu"), ("amd", "amd.com/gpu")):
        rendered = render(
            helm4, over={"workers": LAYOUT, "decode": {"pools": {"gpu": {"accelerator": {"vendor": vendor}}}}}
        )
        deployment = rendered.named("Deployment", "demo-diptych-decode-gpu")
        assert deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"][resource] == 1
        assert settings_of(rendered, deployment)["device"] == "cuda"
        names = [variable["name"] for variable in deployment["spec"]["template"]["spec"]["containers"][0]["env"]]
        assert "DIPTYCH_THREADS" not in names


@pytest.mark.slow
def test_pools_inherit_and_override(helm4: Path) -> None:
    over = {
        "workers": {"settings": {"block_size": 32, "enable_prefix_caching": True}, "drainSeconds": 100},
        "prefill": {"pools": {"default": {}, "b": {"settings": {"block_size": 64}}}},
        "decode": {
            "defaults": {"settings": {"max_num_seqs": 1000000 // 1000}, "drainSeconds": 200},
            "pools": {
                "a": {},
                "b": {
                    "drainSeconds": 0,
                    "settings": {"block_size": 64, "enable_prefix_caching": False, "watermark": 0.25},
                    "topologySpread": [],
                    "pdb": {"enabled": False},
                    "shm": {"enabled": False},
                },
            },
        },
    }
    rendered = render(helm4, over=over)
    a, b = (settings_of(rendered, rendered.named("Deployment", f"demo-diptych-decode-{name}")) for name in "ab")
    assert (a["block_size"], a["enable_prefix_caching"], a["drain_timeout_s"]) == (32, True, 200)
    assert (b["block_size"], b["enable_prefix_caching"], b["drain_timeout_s"]) == (64, False, 0)
    assert b["watermark"] == 0.25 and a["max_num_seqs"] == b["max_num_seqs"] == 1000
    assert isinstance(b["max_num_seqs"], int)
    spec = rendered.named("Deployment", "demo-diptych-decode-b")["spec"]["template"]["spec"]
    assert "topologySpreadConstraints" not in spec and "shm" not in [volume["name"] for volume in spec["volumes"]]
    assert "demo-diptych-decode-b" not in [item["metadata"]["name"] for item in rendered.of("PodDisruptionBudget")]


@pytest.mark.slow
def test_a_pool_may_keep_prefixes_on_disk(helm4: Path) -> None:
    rendered = render(helm4, over={"prefill": {"defaults": {"kvDisk": {"enabled": True, "gib": 7}}}})
    prefill, decode = (rendered.named("Deployment", f"demo-diptych-{role}-default") for role in ("prefill", "decode"))
    settings = settings_of(rendered, prefill)
    assert settings["kv_disk_gib"] == 7 and "kv_disk_gib" not in settings_of(rendered, decode)
    spec = prefill["spec"]["template"]["spec"]
    (mount,) = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "kv-disk"]
    assert settings["kv_disk_path"].startswith(mount["mountPath"] + "/")
    assert {"name": "kv-disk", "emptyDir": {"sizeLimit": "8Gi"}} in spec["volumes"]


@pytest.mark.slow
def test_what_fetches_a_model_has_the_environment_of_its_pod(helm4: Path) -> None:
    proxy = [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}]
    rendered = render(helm4, over={"workers": {"env": proxy}, "router": {"env": proxy}})
    for _, pod in rendered.pods():
        for container in pod["spec"].get("initContainers", ()):
            assert proxy[0] in container["env"]


def test_the_test_s_pod_is_there_for_its_log(rendered: Rendered) -> None:
    """`helm test --logs` asks for it after the test has succeeded."""
    for pod in rendered.of("Pod"):
        assert pod["metadata"]["annotations"]["helm.sh/hook-delete-policy"] == "before-hook-creation"


@pytest.mark.slow
def test_services_take_the_families_that_are_asked_for(helm4: Path) -> None:
    dual = render(helm4, over={"router": {"service": {"ipFamilyPolicy": "PreferDualStack"}}})
    policies = {item["metadata"]["name"]: item["spec"].get("ipFamilyPolicy") for item in dual.of("Service")}
    assert policies.pop("demo-diptych-router-smollm2-135m") == "PreferDualStack"
    assert set(policies.values()) == {None}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "memory", "emptyDir", "claim"])
def test_a_router_keeps_responses_where_it_is_told_to(helm4: Path, kind: str) -> None:
    store = {"type": kind, "claimName": "kept", "size": "5Gi"}
    rendered = render(helm4, over={"router": {"responseStore": store}})
    (deployment,) = [
        item
        for item in rendered.of("Deployment")
        if item["metadata"]["labels"]["app.kubernetes.io/component"] == "router"
    ]
    pod = deployment["spec"]["template"]["spec"]
    path = settings_of(rendered, deployment)["response_store"]
    volumes = [volume for volume in pod["volumes"] if volume["name"] == "responses"]
    mounts = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "responses"]
    if kind in ("none", "memory"):
        assert (path, volumes, mounts) == ({"none": "off"}.get(kind, kind), [], [])
    else:
        source = {
            "emptyDir": {"emptyDir": {"sizeLimit": "5Gi"}},
            "claim": {"persistentVolumeClaim": {"claimName": "kept"}},
        }
        assert volumes == [{"name": "responses"} | source[kind]]
        assert [str(Path(path).parent)] == mounts
    assert deployment["spec"]["strategy"]["type"] == ("Recreate" if kind == "claim" else "RollingUpdate")

"""Volumes that the chart makes for models, and the Job that fills them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .chart import Object, Refused, Rendered, containers, matched, render, settings_of
from .test_render import check_schemas

pytestmark = pytest.mark.helm

MODEL = "qwen"
CLAIM = f"demo-diptych-model-{MODEL}"


def filled(helm: Path, source: Object | None = None, **over: Any) -> Rendered:
    """A model from the hub in a volume of the chart's, fetched ahead; None in `source` leaves a key out."""
    hub = {"id": "Qwen/Qwen3-8B", "tokenSecret": {"name": "hub", "key": "token"}, "cacheVolume": {"size": "50Gi"}}
    given = {**hub, "prefetch": True, **(source or {})}
    kept = {key: value for key, value in given.items() if value is not None}
    models = {"smollm2-135m": None, MODEL: {"source": kept}}
    return render(helm, over={"models": models, **over})


@pytest.mark.slow
def test_the_claim_is_made_and_stays(either_helm: Path) -> None:
    volume = {"size": "50Gi", "storageClass": "nfs", "accessMode": "ReadWriteOnce"}
    (claim,) = filled(either_helm, {"cacheVolume": volume}).of("PersistentVolumeClaim")
    assert claim["metadata"]["name"] == CLAIM
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"], "storageClassName": "nfs", "resources": {"requests": {"storage": "50Gi"}}
    }  # fmt: skip
    kept = claim["metadata"]["annotations"]
    assert kept["helm.sh/resource-policy"] == "keep" and "Prune=false" in kept["argocd.argoproj.io/sync-options"]
    (claim,) = filled(either_helm, {"cacheVolume": {"size": "1Gi", "keep": False}}).of("PersistentVolumeClaim")
    assert "annotations" not in claim["metadata"] and claim["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.slow
def test_every_pod_of_the_model_has_the_volume(helm4: Path) -> None:
    rendered = filled(helm4)
    for item in (*rendered.of("Deployment"), *rendered.of("Job")):
        volumes = {volume["name"]: volume for volume in item["spec"]["template"]["spec"]["volumes"]}
        assert volumes["cache"]["persistentVolumeClaim"] == {"claimName": CLAIM}
    assert check_schemas(rendered, "1.37") >= 15


@pytest.mark.slow
def test_the_job_fetches_what_workers_load(helm4: Path) -> None:
    """With weights, by the router's image, which any node can pull, into the folder where workers look."""
    rendered = filled(helm4)
    (job,) = rendered.of("Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    worker = rendered.named("Deployment", "demo-diptych-decode-default")["spec"]["template"]
    (init,) = worker["spec"]["initContainers"]
    assert container["image"].rpartition("/")[2] == "diptych-router:0.1.0"
    assert container["command"] == init["command"] and container["args"] == init["args"] == ["Qwen/Qwen3-8B"]
    settings = {each["name"]: each for each in container["env"]}
    assert settings["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    assert settings["DIPTYCH_CACHE"]["value"] == "/var/cache/diptych"
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/var/cache/diptych", "/tmp"} == mounts
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "OnFailure"


@pytest.mark.slow
def test_a_job_that_fetches_something_else_has_another_name(helm4: Path) -> None:
    """Kubernetes refuses a change of a Job; what does not concern it leaves its name."""

    def name(source: Object | None = None, **over: Any) -> str:
        (job,) = filled(helm4, source, **over).of("Job")
        return str(job["metadata"]["name"])

    assert name().startswith(f"demo-diptych-fetch-{MODEL}-") and len(name()) <= 63
    assert name() == name(decode={"pools": {"default": {"replicas": 3}}})
    assert len({name(), name({"id": "Qwen/Qwen3-4B"}), name(images={"router": {"tag": "0.2.0"}})}) == 3


def test_the_job_reaches_the_hub_and_nobody_reaches_it(helm4: Path) -> None:
    rendered = filled(helm4)
    policy = rendered.named("NetworkPolicy", "demo-diptych-fetch")
    (job,) = rendered.of("Job")
    labels = job["spec"]["template"]["metadata"]["labels"]
    selector = policy["spec"]["podSelector"]["matchLabels"]
    assert selector.items() <= labels.items() and not matched(rendered, selector), "it selects other pods too"
    assert policy["spec"]["ingress"] == []
    ports = [{port["port"] for port in rule["ports"]} for rule in policy["spec"]["egress"]]
    assert ports == [{53}, {443}]
    assert "demo-diptych-fetch" not in {item["metadata"]["name"] for item in render(helm4).of("NetworkPolicy")}


def test_no_service_leads_to_the_job(helm4: Path) -> None:
    rendered = filled(helm4)
    (job,) = rendered.of("Job")
    labels = job["spec"]["template"]["metadata"]["labels"]
    for service in rendered.of("Service"):
        assert not service["spec"]["selector"].items() <= labels.items()


@pytest.mark.slow_except("source0-*", "source2-*")
@pytest.mark.parametrize(
    ("source", "said"),
    (
        ({"cacheClaim": "mine"}, "models.qwen.source has both cacheClaim mine, .* and cacheVolume.*: use one"),
        ({"cacheVolume": None}, r"models.qwen.source.prefetch needs a volume for all pods: set cacheVolume\.size"),
        ({"cacheVolume": {"size": "many"}}, "does not match pattern"),
        ({"cacheVolume": {"size": "1Gi", "accessMode": "ReadOnlyMany"}}, "must be one of|value must be one of"),
    ),
)
def test_what_cannot_be_is_refused(helm4: Path, source: Object, said: str) -> None:
    with pytest.raises(Refused, match=said):
        filled(helm4, source)


def test_a_tokenizer_has_no_volume_of_its_own(helm4: Path) -> None:
    """A key that would do nothing is refused."""
    tokenizer = {"id": "Qwen/Qwen3-8B", "cacheVolume": {"size": "1Gi"}}
    with pytest.raises(Refused, match="tokenizer"):
        render(helm4, over={"models": {"smollm2-135m": {"source": {"id": "x"}, "tokenizer": tokenizer}}})


def test_a_path_is_served_from_what_operators_mount(helm4: Path) -> None:
    """The example copies a bucket: nothing of the chart's mounts or downloads weights."""
    rendered = render(helm4, "object-store")
    for pool in ("prefill", "decode"):
        deployment = rendered.named("Deployment", f"demo-diptych-{pool}-default")
        spec = deployment["spec"]["template"]["spec"]
        assert settings_of(rendered, deployment)["model"] == "/weights/qwen3-8b"
        assert [each["name"] for each in spec["initContainers"]] == ["copy-weights"]
        assert {"name": "weights", "mountPath": "/weights"} in spec["containers"][0]["volumeMounts"]
        assert "model" not in {volume["name"] for volume in spec["volumes"]}
    router = rendered.named("Deployment", "demo-diptych-router-qwen3-8b")["spec"]["template"]["spec"]
    assert router["initContainers"][0]["args"] == ["Qwen/Qwen3-8B", "--no-weights"]
    egress = rendered.named("NetworkPolicy", "demo-diptych-decode")["spec"]["egress"]
    assert {"ports": [{"port": 443, "protocol": "TCP"}]} in egress


@pytest.mark.slow
def test_a_modelcar_is_mounted_under_its_own_name(helm4: Path) -> None:
    source = {"reference": "oci://registry.example.com/modelcars/qwen:1", "path": "models"}
    rendered = render(helm4, over={"models": {"smollm2-135m": {"source": source}}})
    worker = rendered.named("Deployment", "demo-diptych-decode-default")["spec"]["template"]
    (volume,) = [each for each in worker["spec"]["volumes"] if "image" in each]
    assert volume["image"] == {"reference": "registry.example.com/modelcars/qwen:1", "pullPolicy": "IfNotPresent"}
    assert "/models" in {mount["mountPath"] for each in containers(worker) for mount in each["volumeMounts"]}
    config = rendered.named("ConfigMap", "demo-diptych-decode-default")["data"]["diptych.toml"]
    assert 'model = "/models/models"' in config


@pytest.mark.parametrize(("draft", "changes"), [("org/small", False), ("org/small", True), ("/weights/small", False)])
def test_a_draft_model_is_fetched_by_pods_that_decode(helm4: Path, draft: str, changes: bool) -> None:
    """Also if the model itself is on a volume, and from addresses that their policies allow. A path is not fetched."""
    over = {
        "models": {"m": {"source": {"claimName": "models"}}},
        "workers": {"settings": {"role_change": changes}},
        "decode": {"defaults": {"settings": {"draft_model": draft}}},
        "networkPolicy": {"hubPorts": [8443]},
    }
    rendered = render(helm4, over=over)
    found = {}
    for role in ("prefill", "decode"):
        pod = rendered.named("Deployment", f"demo-diptych-{role}-default")["spec"]["template"]["spec"]
        found[role] = [(each["name"], each["args"]) for each in pod.get("initContainers", ())]
    fetch = [("fetch-draft-model", ["org/small"])] if draft == "org/small" else []
    assert found == {"prefill": fetch if changes else [], "decode": fetch}
    egress = rendered.named("NetworkPolicy", "demo-diptych-decode")["spec"]["egress"]
    assert ("8443" in str(egress)) == bool(fetch)


def test_a_draft_model_is_fetched_with_the_token_of_the_model(helm4: Path) -> None:
    rendered = filled(helm4, decode={"defaults": {"settings": {"draft_model": "org/small"}}})
    pod = rendered.named("Deployment", "demo-diptych-decode-default")["spec"]["template"]["spec"]
    tokens = [each for fetch in pod["initContainers"] for each in fetch["env"] if each["name"] == "HF_TOKEN"]
    assert [each["valueFrom"]["secretKeyRef"] for each in tokens] == [{"name": "hub", "key": "token"}] * 2

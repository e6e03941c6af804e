"""values.schema.json catches what is wrong before it reaches a cluster; what is written from values is current."""

from __future__ import annotations

import copy
import ipaddress
import json
import re
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import PrefillWorkerConfig, RouterConfig
from common.config.field import fields_of
from common.config.worker import CPU_BLOCK, GPU_BLOCK

from .chart import CHART, LAYOUT, NEEDED, Refused, Rendered, render

pytestmark = pytest.mark.helm

MODEL = {"source": {"id": "m"}}


def paths_of(table: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every mapping of the chart's values that has keys of its own."""
    yield path
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from paths_of(value, (*path, key))


FREE_FORM = {("monitoring", "dashboards", "labels")}
# As in a pod, whose fields the API server knows.
CONTEXTS = {"podSecurityContext", "securityContext"}
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
CLOSED = [
    path
    for path in paths_of(VALUES)
    if path not in FREE_FORM and path[-1:] not in (("requests",), ("limits",)) and not CONTEXTS & set(path)
]


def test_a_misspelt_key_is_caught_at_every_depth() -> None:
    """Straight through the schema: a helm run for each of them would take minutes."""
    import jsonschema

    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft7Validator(schema)
    assert validator.is_valid(VALUES)
    for path in CLOSED:
        wrong = copy.deepcopy(VALUES)
        inner = wrong
        for key in path:
            inner = inner[key]
        inner["mispelt"] = 1
        assert not validator.is_valid(wrong), ".".join(path)


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"decode": {"pools": {"default": {"settings": {"max_num_seq": 8}}}}}, "max_num_seq"),
    ({"decode": {"pools": {"default": {"settings": {"max_num_seqs": -1}}}}}, "max_num_seqs"),
    ({"decode": {"pools": {"default": {"settings": {"block_size": 17}}}}}, "block_size"),
    ({"prefill": {"pools": {"default": {"settings": {"watermark": 0.1}}}}}, "watermark"),
    ({"prefill": {"pools": {"default": {"settings": {"port": 1}}}}}, "port"),
    ({"router": {"settings": {"queue_timeout_s": "30"}}}, "queue_timeout_s"),
    ({"workers": {"accelerator": {"vendor": "nvida"}}}, "vendor"),
    ({"decode": {"pools": {"a": {"name": "b"}}}}, "name"),
    ({"decode": {"pools": {"Not_A_Label": {}}}}, "Not_A_Label"),
    ({"models": {"m": {"source": {"type": "hub"}}}}, "source"),
    ({"models": {"m": {}}}, "source"),
    ({"models": {"m": {"source": {"claimName": "c", "id": "x"}}}}, "source"),
    ({"images": {"worker": {"digest": "latest"}}}, "digest"),
    ({"workers": {"strategy": {"maxSurge": "half"}}}, "maxSurge"),
    ({"workers": {"resources": {"claims": [{"nmae": "gpu"}]}}}, "nmae"),
    ({"test": {"apiKeySecret": {"name": "keys"}}}, "apiKeySecret"),
    ({"httpRoute": {"requestTimeout": "10"}}, "requestTimeout"),
    ({"router": {"responseStore": {"type": "disk"}}}, "responseStore"),
    ({"router": {"settings": {"response_store": "/x"}}}, "response_store"),
    ({"networkPolicy": {"dnsPorts": []}}, "dnsPorts"),
    ({"sharedRouter": {"enabled": "yes"}}, "sharedRouter"),
    ({"sharedRouter": {"splits": [{"name": "a b", "weights": {"m": 1}}]}}, r"splits[./]0[./]name"),
    ({"sharedRouter": {"splits": [{"name": "s", "weights": {}}]}}, r"splits[./]0[./]weights"),
    ({"sharedRouter": {"splits": [{"name": "s", "weights": {"m": -1}}]}}, r"splits[./]0[./]weights[./]m"),
    ({"models": {"m": {**MODEL, "aliases": ["a b"]}}}, r"models[./]m[./]aliases[./]0"),
    ({"models": {"m": {**MODEL, "hold": "no"}}}, r"models[./]m[./]hold"),
    ({"models": {"m": {**MODEL, "limits": {"requestsPerHour": 1}}}}, "requestsPerHour"),
    ({"models": {"m": {**MODEL, "toolParser": "lama3"}}}, "toolParser"),
    ({"models": {"m": {**MODEL, "reasoningStart": "<a>"}}}, "reasoningEnd"),
    ({"models": {"m": {**MODEL, "reasoningStart": " <a>", "reasoningEnd": "</a>"}}}, "reasoningStart"),
    ({"router": {"settings": {"models_file": "/x"}}}, "models_file"),
    ({"workers": {"resources": {"limits": {"memory": "8GB"}}}}, "limits[./]memory"),
    ({"workers": {"resources": {"limits": {"memory": "8m"}}}}, "limits[./]memory"),
    ({"workers": {"resources": {"requests": {"cpu": "two"}}}}, "requests[./]cpu"),
    ({"workers": {"shm": {"size": "lots"}}}, "shm[./]size"),
    ({"networkPolicy": {"apiServerCIDRs": ["10.96.0.1"]}}, r"apiServerCIDRs[./]0"),
    ({"networkPolicy": {"hubCIDRs": ["10.0.0.300/8"]}}, r"hubCIDRs[./]0"),
    ({"networkPolicy": {"clients": [{"ipBlock": {"cidr": "fd00::/129"}}]}}, "ipBlock[./]cidr"),
    ({"commonLabels": {"team": "a b"}}, "commonLabels[./]team"),
    ({"monitoring": {"prometheusAddress": "prometheus:9090"}}, "prometheusAddress"),
    ({"workers": {"autoscaling": {"price": 0}}}, r"autoscaling[./]price"),
    ({"decode": {"pools": {"default": {"autoscaling": {"price": -1}}}}}, r"autoscaling[./]price"),
    ({"workers": {"startupSeconds": 1}}, r"workers[./]startupSeconds"),
    ({"router": {"startupSeconds": 1}}, r"router[./]startupSeconds"),
)


def overlaid(values: Any, over: Any) -> Any:
    """As helm merges values: maps member by member, and a null takes its member away."""
    if not isinstance(values, dict) or not isinstance(over, dict):
        return over
    merged = {key: overlaid(values.get(key), value) for key, value in over.items()}
    return {key: value for key, value in (values | merged).items() if value is not None}


def test_bad_values_are_refused_by_the_schema() -> None:
    import jsonschema

    validator = jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text(encoding="utf-8")))
    needed = overlaid(VALUES, NEEDED)
    assert validator.is_valid(needed)
    good = {
        "networkPolicy": {"hubCIDRs": ["0.0.0.0/0", "fd00::1/128", "::/0", "::ffff:10.0.0.1/120"]},
        "workers": {"resources": {"limits": {"cpu": 1.5, "memory": "1e9", "hugepages-2Mi": "1Gi", "rdma/hca": 1}}},
    }
    assert validator.is_valid(overlaid(needed, good))
    for over, message in BAD:
        errors = [*validator.iter_errors(overlaid(needed, over))]
        said = [f"{'/'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]
        assert any(re.search(message, each) for each in said), (message, said)


@pytest.mark.slow_except(*(f"{helm}-over0-{BAD[0][1]}" for helm in ("helm3", "helm4")))
@pytest.mark.parametrize(("over", "message"), BAD)
def test_bad_values_are_refused_by_both_helms(either_helm: Path, over: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        render(either_helm, over=over)


@pytest.mark.slow_cases("helm4-over1-*")
@pytest.mark.parametrize(
    ("over", "shown"),
    (
        (
            {"models": [{"name": "m", "source": {"id": "x"}}]},
            "models is a list; .*\nmodels:\n  m:\n    source:\n      id: x",
        ),
        (
            {"decode": {"pools": [{"name": "a", "replicas": 2}]}},
            "decode.pools is a list; .*\npools:\n  a:\n    replicas: 2",
        ),
    ),
)
def test_a_list_of_old_is_refused_with_the_map_to_write(either_helm: Path, over: dict[str, Any], shown: str) -> None:
    with pytest.raises(Refused, match=shown):
        render(either_helm, over=over)


TWO_MODELS = {name: {"source": {"id": name}} for name in ("one", "two")}
KEDA = {"type": "keda", "kedaTrigger": "metrics-api"}
FOLLOWS = {"type": "keda", "kedaTrigger": "prometheus", "slo": True}
ROUTE = {"enabled": True, "parentRefs": [{"name": "public"}]}


RWO = {"source": {"id": "m", "cacheVolume": {"size": "50Gi", "accessMode": "ReadWriteOnce"}}}


@pytest.mark.slow_except(
    "over0-*", "over3-*", "over4-*", "over11-characters, but Kubernetes*", "over16-a Service cannot be named 1st-"
)
@pytest.mark.parametrize(
    ("over", "message"),
    (
        ({"models": TWO_MODELS}, "must name its model, one of one, two"),
        ({"decode": {"pools": {"default": {"model": "thre"}}}}, 'names the model "thre", but models has smollm2-135m'),
        (
            {
                "models": TWO_MODELS,
                "prefill": {"pools": {"default": None}},
                "decode": {"pools": {"default": {"model": "one"}}},
            },
            "model two has no decode pool",
        ),
        ({"models": {}}, "models is empty: name a model, for example --set models.smollm2-135m.source.id=smollm2-135m"),
        (
            {"decode": {"pools": {"default": {"enabled": False}}}},
            "smollm2-135m has no decode pool: add decode.pools.NAME",
        ),
        ({"workers": {"autoscaling": {"type": "hpa", "minReplicas": 0}}}, "an HPA cannot scale to zero"),
        ({"workers": {"autoscaling": {"type": "hpa", "minReplicas": 9}}}, "minReplicas 9 is above maxReplicas 4"),
        (
            {"decode": {"pools": {"more": {}}, "defaults": {"autoscaling": KEDA}}},
            "has several decode pools, and a router reports their sum",
        ),
        (
            {"decode": {"pools": {"more": {}}, "defaults": {"autoscaling": {"type": "planner"}}}},
            "has several decode pools, and its router plans them as one",
        ),
        ({"prefill": {"defaults": {"autoscaling": {"type": "planner"}}}}, "needs a decode pool with the same"),
        ({"workers": {"accelerator": {"vendor": "intel"}}}, "needs accelerator.device"),
        ({"fullnameOverride": "x" * 60}, "characters, but Kubernetes allows 63"),
        ({"tls": {"certManager": {"enabled": True}}}, "needs tls.certManager.issuerRef.name"),
        ({"monitoring": {"serviceMonitor": {"enabled": True}}}, "every pod would be scraped twice"),
        ({"workers": {"autoscaling": {**KEDA, "slo": True}}}, "autoscaling.slo needs kedaTrigger prometheus"),
        ({"decode": {"defaults": {"autoscaling": FOLLOWS}}}, "and slo.tpotMs of model smollm2-135m"),
        ({"fullnameOverride": "1st"}, "a Service cannot be named 1st-"),
        ({"workers": {"strategy": {"maxSurge": "0%"}}}, "prefill pool default: strategy.maxSurge and"),
        ({"router": {"strategy": {"maxSurge": 0}}}, "router of model smollm2-135m: strategy.maxSurge and"),
        ({"prefill": {"defaults": {"autoscaling": {**KEDA, "target": 0}}}}, "the minimum is 0.001"),
        ({"router": {"autoscaling": {"enabled": True, "minReplicas": 9}}}, "minReplicas 9 is above maxReplicas 6"),
        (
            {"router": {"replicas": 2, "responseStore": {"type": "emptyDir"}}},
            "router of model smollm2-135m: responseStore.type emptyDir needs one replica and no autoscaling",
        ),
        (
            {"router": {"autoscaling": {"enabled": True}, "responseStore": {"type": "memory"}}},
            "responseStore.type memory needs one replica",
        ),
        ({"router": {"responseStore": {"type": "claim"}}}, "responseStore.type claim needs responseStore.claimName"),
        ({"ingress": {"enabled": True}}, "ingress.enabled needs ingress.hosts"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.enabled needs httpRoute.parentRefs"),
        ({"httpRoute": {**ROUTE, "toInferencePool": True}}, "toInferencePool needs inferencePool.enabled"),
        (
            {"router": {"settings": {"router_processes": 2}}, "decode": {"defaults": {"autoscaling": KEDA}}},
            "KEDA reads one series of a router, and with router_processes above 1 each process has its own",
        ),
        ({"inferencePool": {"enabled": True}}, "needs inferencePool.endpointPicker: {name, port}"),
        ({"workers": {"autoscaling": {**KEDA, "signal": "plan"}}}, "plan needs router.settings.planner: advice"),
        (
            {
                "workers": {"autoscaling": {**KEDA, "kedaTrigger": "prometheus", "signal": "plan"}},
                "router": {"settings": {"planner": "advice"}},
                "decode": {"pools": {"a": {}, "b": {}}},
            },
            "its router plans them as one; use autoscaling.signal load",
        ),
        (
            {"images": {"registry": "https://ghcr.io/acme"}},
            '"https://ghcr.io/acme/diptych-router" is not an image name',
        ),
        ({"workers": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}, "accelerator.vendor none runs the CPU image"),
        (
            {"workers": {"accelerator": {"vendor": "nvidia"}, "resources": {"limits": {"nvidia.com/gpu": "2"}}}},
            "has nvidia.com/gpu 2, but its pods use 1",
        ),
        (
            {"workers": {"resources": {"requests": {"cpu": "4100m"}}}},
            "requests.cpu 4100m is above resources.limits.cpu",
        ),
        ({"router": {"resources": {"requests": {"memory": "2049Mi"}}}}, "2049Mi is above resources.limits.memory 2Gi"),
        ({"workers": {"settings": {"kv_memory_gib": 8}}}, "leaves nothing of resources.limits.memory 8Gi"),
        (
            {"workers": {"kvDisk": {"enabled": True}, "resources": {"limits": {"ephemeral-storage": "10Gi"}}}},
            "kvDisk.gib 32 is above resources.limits.ephemeral-storage 10Gi",
        ),
        ({"workers": {"podSecurityContext": {"runAsUser": 0}}}, "runAsUser 0 with runAsNonRoot true never starts"),
        ({"workers": {"extraVolumes": [{"name": "cache"}]}}, "extraVolumes has cache, a volume of the chart"),
        ({"router": {"sidecars": [{"name": "router", "image": "a/b:1"}]}}, "router is a container of the chart"),
        (
            {"workers": {"settings": {"kv_transport": "nixl"}}, "curve": {"existingSecret": "curve"}},
            "kv_transport is nixl, which curve.existingSecret does not encrypt",
        ),
        ({"workers": {"settings": {"kv_transport": "shm"}}}, "pods do not share a process namespace"),
        ({"router": {"service": {"nodePort": 30080}}}, "nodePort 30080 needs service.type NodePort or LoadBalancer"),
        (
            {"router": {"service": {"type": "NodePort", "loadBalancerSourceRanges": ["10.0.0.0/8"]}}},
            "loadBalancerSourceRanges needs service.type LoadBalancer, not NodePort",
        ),
        (
            {
                "models": {"one": {"source": {"id": "one"}}, "two": {"source": {"id": "two"}}},
                "router": {"service": {"type": "NodePort", "nodePort": 30080}},
                "prefill": {"pools": {"default": None}},
                "decode": {"pools": {"default": None, "one": {}, "two": {}}},
            },
            "nodePort 30080 is set for two routers",
        ),
        (
            {"models": {"smollm2-135m": {"source": {"id": "m"}, "adapters": {"sql": {"path": "/a"}, "old": None}}}},
            "max_loras is 0, but models.smollm2-135m.adapters has 1: set workers.settings.max_loras to 1 or more",
        ),
        (
            {"models": {"smollm2-135m": RWO}, "workers": {"replicas": 2}},
            "accessMode ReadWriteOnce is for one node, but decode pool default has up to 2: use ReadWriteMany",
        ),
        ({"workers": {"securityContext": {"runAsUser": 0}}}, "runAsUser 0 with runAsNonRoot true never starts"),
        (
            {"workers": {"replicas": 2, "pdb": {"minAvailable": "60%"}}},
            "with 2 pods, pdb.minAvailable 60% allows no eviction",
        ),
        (
            {"workers": {"env": [{"name": "DIPTYCH_PORT", "value": "9000"}]}},
            "prefill pool default: env has DIPTYCH_PORT, which would override settings of the chart: use `settings`",
        ),
        (
            {"router": {"env": [{"name": "HOME", "value": "/root"}]}},
            "router of model smollm2-135m: env has HOME, which the chart sets: remove it",
        ),
        (
            {"models": {"smollm2-135m": {**MODEL, "tokenizer": {"claimName": "models", "path": "a/../../b"}}}},
            "models.smollm2-135m.tokenizer.path a/../../b leaves its folder: use a path without ..",
        ),
    ),
)
def test_what_does_not_fit_together_is_refused_with_a_sentence(helm4: Path, over: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused) as refused:
        render(helm4, over=over)
    assert message in str(refused.value)


def test_what_only_looks_wrong_is_accepted(helm4: Path) -> None:
    """The container's user wins over the pod's, and a secret setting has no other place than a variable."""
    root = {"runAsUser": 0, "runAsNonRoot": False}
    key = {"name": "DIPTYCH_API_KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "plain"}}}
    workers = {"securityContext": root, "replicas": 3, "pdb": {"minAvailable": "60%"}}
    render(helm4, over={"workers": workers, "router": {"env": [key, {"name": "DIPTYCH_MARCH", "value": "avx2"}]}})


def test_pools_that_cannot_exchange_kv_are_refused(helm4: Path) -> None:
    """All differences are in one message, with the defaults of the hardware."""
    over = {"prefill": {"pools": {"default": {"accelerator": {"vendor": "nvidia"}}}}}
    with pytest.raises(Refused) as refused:
        render(helm4, over=over)
    assert (
        "model smollm2-135m: decode pool default and prefill pool default cannot exchange KV, because they have "
        f"block_size {CPU_BLOCK} (the default on cpu) and {GPU_BLOCK} (the default on cuda), "
        "dtype auto (the default on cpu) and bfloat16 (the default on cuda): "
        "set the same settings.block_size and settings.dtype in both"
    ) in str(refused.value)


SHARED = {
    "dtype": ("float32", "bfloat16"),
    "quantization": ("int8", "none"),
    "block_size": (32, 16),
    "kv_cache_dtype": ("fp8", "auto"),
    "batch_invariant": (True, False),
    "draft_head": ("mtp", ""),
}


def test_the_layout_has_every_setting_that_workers_must_share() -> None:
    shared = {field.name for field in fields_of(PrefillWorkerConfig) if "need the same value" in field.rule.details}
    assert shared | {"dtype", "quantization"} == SHARED.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_each_setting_of_the_layout_must_be_equal(helm4: Path, name: str) -> None:
    one, other = SHARED[name]
    over = {"prefill": {"defaults": {"settings": {name: one}}}, "decode": {"defaults": {"settings": {name: other}}}}
    with pytest.raises(Refused, match=f"cannot exchange KV, because they have {name} "):
        render(helm4, over=over)


def test_pools_that_can_exchange_kv_are_accepted(helm4: Path) -> None:
    """Ranks, lengths and defaults may differ, a pool needs one partner, and a decode pool without pods needs none."""
    gpu = {"accelerator": {"vendor": "nvidia"}}
    embedding = {"prefill": {"embed": {**gpu, "model": "embed"}}, "decode": {"embed": {"replicas": 0}}}
    prefill = {
        "auto": {**gpu, "model": "m", "settings": {"max_model_len": 4096, "kv_cache_dtype": "native"}},
        "cpu": {"model": "m", "settings": {"quantization": "none"}},
    }
    decode = {
        "given": {**gpu, "model": "m", "tensorParallelSize": 2, "settings": {"block_size": 64, "dtype": "bfloat16"}},
        "cpu": {"model": "m"},
    }
    models = {"m": {"source": {"id": "m"}}, "embed": {"source": {"id": "embed"}}}
    over = {
        "models": models,
        "prefill": {"pools": {"default": None, **prefill, **embedding["prefill"]}},
        "decode": {"pools": {"default": None, **decode, **embedding["decode"]}},
    }
    assert len(render(helm4, over=over).of("Deployment")) == 8


def test_the_deletion_cost_needs_its_policy(helm4: Path) -> None:
    over = {"podDeletionCost": {"enabled": True}}
    with pytest.raises(
        Refused, match=r"admissionPolicy, without which a worker could change every pod of the namespace"
    ):
        render(helm4, over=over, apis=())
    given = render(helm4, over={"podDeletionCost": {"enabled": True, "admissionPolicy": False}}, apis=())
    assert not given.of("ValidatingAdmissionPolicy")


def test_no_example_takes_the_api_server_for_its_service() -> None:
    """Policies apply after the Service's address was translated. 10.96.0.0/12 is kubeadm's range for Services."""
    services = ipaddress.ip_network("10.96.0.0/12")
    for file in (CHART / "examples").glob("*.yaml"):
        policy = yaml.safe_load(file.read_text(encoding="utf-8")).get("networkPolicy", {})
        found = [ipaddress.ip_network(cidr) for cidr in policy.get("apiServerCIDRs", ())]
        assert not [str(cidr) for cidr in found if cidr.overlaps(services)], file.name


def test_the_schema_is_what_make_docs_writes() -> None:
    written = runpy.run_path(str(CHART / "write_schema.py"))["render"]()
    assert (CHART / "values.schema.json").read_text(encoding="utf-8") == written


def test_the_readme_is_what_make_docs_writes() -> None:
    assert (CHART / "README.md").read_text(encoding="utf-8") == runpy.run_path(str(CHART / "write_readme.py"))[
        "render"
    ]()


def test_dashboards_are_what_make_docs_writes() -> None:
    program = runpy.run_path(str(CHART / "write_dashboards.py"))
    for name in program["DASHBOARDS"]:
        assert (CHART / "dashboards" / f"{name}.json").read_text(encoding="utf-8") == program["render"](name)


def test_the_chart_has_the_version_of_the_code() -> None:
    from common.version import RELEASE

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == chart["version"] == RELEASE


def notes_of(helm: Path, home: Path, *flags: str, models: bool = False) -> str:
    """NOTES.txt is only shown by install; a dry run on the client renders it without a cluster.

    Of one model, unless the flags name `models`.
    """
    needed = ["--set", "images.registry=registry.example.com"]
    needed += [] if models else ["--set", "models.smollm2-135m.source.id=smollm2-135m"]
    line = [str(helm), "install", "demo", str(CHART), "--namespace", "llm", "--dry-run=client", *needed, *flags]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, env={"HOME": str(home), "PATH": ""})
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]


@pytest.mark.slow
def test_notes_say_how_to_try_it(helm4: Path, tmp_path: Path) -> None:
    notes = notes_of(helm4, tmp_path)
    assert "port-forward service/demo-diptych-router-smollm2-135m" in notes and "helm test demo" in notes
    assert "Longer ones are interrupted" not in notes


@pytest.mark.slow
def test_notes_warn_of_answers_that_an_update_would_cut(helm4: Path, tmp_path: Path) -> None:
    assert RouterConfig(decode=("tcp://d:1",)).request_timeout_s == 600  # what NOTES.txt takes it for
    notes = notes_of(helm4, tmp_path, "--set", "router.settings.request_timeout_s=900")
    assert "waits 600 s (drainSeconds) for running responses, but one may take up to 900 s" in notes


def template(helm: Path, *flags: str) -> str:
    """What `helm template` prints of the chart alone with these flags."""
    line = [str(helm), "template", "demo", str(CHART), "--namespace", "llm", *flags]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise Refused(done.stderr)
    return done.stdout


@pytest.mark.slow
def test_a_model_and_a_pool_are_set_from_the_command_line(either_helm: Path) -> None:
    text = template(
        either_helm,
        *("--set", "images.registry=ghcr.io/acme", "--set", "models.qwen.source.id=Qwen/Qwen3-8B"),
        *("--set", "decode.pools.default.replicas=3", "--set", "prefill.pools.default.enabled=false"),
    )
    objects = [item for item in yaml.safe_load_all(text) if item and item["kind"] == "Deployment"]
    replicas = {item["metadata"]["name"]: item["spec"]["replicas"] for item in objects}
    assert replicas == {"demo-diptych-router-qwen": 1, "demo-diptych-decode-default": 3}
    images = [each["image"] for item in objects for each in item["spec"]["template"]["spec"]["containers"]]
    assert sorted(images) == ["ghcr.io/acme/diptych-router:0.1.0", "ghcr.io/acme/diptych-worker:0.1.0-cpu"]


@pytest.mark.slow
def test_an_overlay_takes_entries_away_and_a_pool_belongs_to_the_model_of_its_name(helm4: Path, tmp_path: Path) -> None:
    overlay = {"models": {"small": None}, "decode": {"pools": {"small": None}}, "prefill": {"pools": {"small": None}}}
    (tmp_path / "overlay.json").write_text(json.dumps(overlay))
    base = ("--api-versions=keda.sh/v1alpha1", "-f", str(CHART / "examples" / "several-models.yaml"))
    text = template(helm4, *base, "-f", str(tmp_path / "overlay.json"), "--set", "ingress.enabled=false")
    names = {item["metadata"]["name"] for item in yaml.safe_load_all(text) if item and item["kind"] == "Deployment"}
    roles = {"router-large", "prefill-large", "decode-large-nvidia", "decode-large-amd"}
    assert names == {f"demo-diptych-{role}" for role in roles}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("images", "name"),
    (
        ({"registry": "ghcr.io/acme/"}, "ghcr.io/acme/diptych-worker:0.1.0-cpu"),
        (
            {"registry": "", "worker": {"repository": "localhost/w"}, "router": {"repository": "h:5000/r"}},
            "localhost/w",
        ),
        ({"worker": {"digest": "sha256:" + "a" * 64}}, "registry.example.com/diptych-worker@sha256:" + "a" * 64),
    ),
)
def test_images_have_whole_names(helm4: Path, images: dict[str, Any], name: str) -> None:
    assert f'image: "{name}' in render(helm4, over={"images": images}).text


@pytest.mark.slow
def test_without_a_host_an_image_is_refused(either_helm: Path) -> None:
    for images in ({"registry": ""}, {"registry": "acme"}):
        with pytest.raises(Refused, match=r"contains no host: build and push .* --set images\.registry=ghcr\.io/acme"):
            render(either_helm, over={"images": images})


@pytest.mark.slow
def test_a_pool_may_have_an_image_of_its_own(helm4: Path) -> None:
    digest = "sha256:" + "b" * 64
    pools = {"amd": {"image": {"tag": "rocm"}}, "default": {}, "pinned": {"image": {"digest": digest}}}
    over = {"images": {"worker": {"digest": "sha256:" + "a" * 64}}, "decode": {"pools": pools}}
    rendered = render(helm4, over=over)
    ends = {"amd": ":rocm", "default": "@sha256:" + "a" * 64, "pinned": f"@{digest}"}
    for pool, end in ends.items():
        spec = rendered.named("Deployment", f"demo-diptych-decode-{pool}")["spec"]["template"]["spec"]
        assert {each["image"] for each in (*spec["initContainers"], *spec["containers"])} == {
            "registry.example.com/diptych-worker" + end
        }


def image_of(rendered: Rendered, pool: str) -> str:
    spec = rendered.named("Deployment", f"demo-diptych-decode-{pool}")["spec"]["template"]["spec"]
    (image,) = {each["image"] for each in (*spec["initContainers"], *spec["containers"])}
    return str(image).partition("diptych-worker")[2]


@pytest.mark.slow
def test_a_pool_s_image_is_that_of_its_accelerator(helm4: Path) -> None:
    pools = {vendor: {"accelerator": {"vendor": vendor}} for vendor in ("none", "nvidia", "amd")}
    over: dict[str, Any] = {"workers": LAYOUT, "decode": {"pools": pools}}
    ends = {pool: image_of(render(helm4, over=over), pool) for pool in pools}
    assert ends == {"none": ":0.1.0-cpu", "nvidia": ":0.1.0-cuda", "amd": ":0.1.0-rocm"}

    digests = {"cpu": "sha256:" + "c" * 64, "cuda": "sha256:" + "d" * 64}
    over["images"] = {"worker": {"digests": digests}}
    ends = {pool: image_of(render(helm4, over=over), pool) for pool in pools}
    assert ends == {"none": f"@{digests['cpu']}", "nvidia": f"@{digests['cuda']}", "amd": ":0.1.0-rocm"}

    nixl = {"settings": {**LAYOUT["settings"], "kv_transport": "nixl"}}
    rendered = render(
        helm4, over=over | {"workers": nixl, "decode": {"pools": {"nvidia": pools["nvidia"], "none": {}}}}
    )
    assert [image_of(rendered, pool) for pool in ("nvidia", "none")] == [":0.1.0-cuda-nixl", ":0.1.0-cpu-nixl"]

    over["decode"] = {"pools": {"none": {"image": {"tag": "mine"}}}}
    assert image_of(render(helm4, over=over), "none") == ":mine"


@pytest.mark.slow
def test_an_accelerator_without_an_image_needs_one(helm4: Path) -> None:
    pool: dict[str, Any] = {"accelerator": {"vendor": "intel", "device": "xpu"}}
    with pytest.raises(Refused, match=r"no worker image is built for accelerator\.vendor intel: set image\.repository"):
        render(helm4, over={"decode": {"pools": {"default": pool}}})
    pool["image"] = {"tag": "xpu"}
    assert image_of(render(helm4, over={"decode": {"pools": {"default": pool}}}), "default") == ":xpu"


@pytest.mark.slow
def test_notes_warn_of_a_capability_without_effect(helm4: Path, tmp_path: Path) -> None:
    flags = ("--set", "workers.securityContext.capabilities.add={IPC_LOCK}")
    warning = "decode pool default: the capability IPC_LOCK has no effect for user"
    assert f"{warning} 10001" in notes_of(helm4, tmp_path, *flags)
    root = "--set=workers.podSecurityContext.runAsUser=0,workers.podSecurityContext.runAsNonRoot=false"
    container = "--set=workers.securityContext.runAsNonRoot=false"
    assert warning not in notes_of(helm4, tmp_path, *flags, root, container)
    assert warning not in notes_of(helm4, tmp_path, *flags, f"{container},workers.securityContext.runAsUser=0")


@pytest.mark.slow
def test_notes_warn_of_a_planner_without_goals(helm4: Path, tmp_path: Path) -> None:
    flags = ("--set=workers.autoscaling.type=planner",)
    warning = "model smollm2-135m has no slo, so its router sizes its pools for throughput, not for latency"
    assert warning in notes_of(helm4, tmp_path, *flags)
    assert warning not in notes_of(helm4, tmp_path, *flags, "--set=models.smollm2-135m.slo.ttftMs=500")


@pytest.mark.slow
def test_notes_say_that_the_test_has_no_key(helm4: Path, tmp_path: Path) -> None:
    flags = ("--set", "apiKeys.existingSecret=keys")
    assert "helm test has none: set test.apiKeySecret" in notes_of(helm4, tmp_path, *flags)
    has_one = ("--set", "test.apiKeySecret.name=a", "--set", "test.apiKeySecret.key=b")
    assert "helm test has none" not in notes_of(helm4, tmp_path, *flags, *has_one)

"""values.schema.json catches what is wrong before it reaches a cluster; what is written from values is current."""

from __future__ import annotations

import copy
import json
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import RouterConfig

from .chart import CHART, Refused, render

pytestmark = pytest.mark.helm

POOL = {"name": "default"}
MODEL = {"name": "m", "source": {"type": "hub", "id": "m"}}


def paths_of(table: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every mapping of the chart's values that has keys of its own."""
    yield path
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from paths_of(value, (*path, key))


FREE_FORM = {("monitoring", "dashboards", "labels")}
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
CLOSED = [path for path in paths_of(VALUES) if path not in FREE_FORM and path[-1:] not in (("requests",), ("limits",))]


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


@pytest.mark.parametrize(
    ("over", "message"),
    (
        ({"decode": {"pools": [{**POOL, "settings": {"max_num_seq": 8}}]}}, "max_num_seq"),
        ({"decode": {"pools": [{**POOL, "settings": {"max_num_seqs": -1}}]}}, "max_num_seqs"),
        ({"decode": {"pools": [{**POOL, "settings": {"block_size": 17}}]}}, "block_size"),
        ({"prefill": {"pools": [{**POOL, "settings": {"watermark": 0.1}}]}}, "watermark"),
        ({"prefill": {"pools": [{**POOL, "settings": {"port": 1}}]}}, "port"),
        ({"router": {"settings": {"queue_timeout_s": "30"}}}, "queue_timeout_s"),
        ({"workers": {"accelerator": {"vendor": "nvida"}}}, "vendor"),
        ({"decode": {"pools": []}}, "pools"),
        ({"decode": {"pools": [{"replicas": 1}]}}, "name"),
        ({"decode": {"pools": [{"name": "Not_A_Label"}]}}, "name"),
        ({"models": [{"name": "m", "source": {"type": "hub"}}]}, "source"),
        ({"models": [{"name": "m", "source": {"type": "pvc", "claimName": "c", "id": "x"}}]}, "source"),
        ({"images": {"worker": {"digest": "latest"}}}, "digest"),
        ({"workers": {"strategy": {"maxSurge": "half"}}}, "maxSurge"),
        ({"workers": {"resources": {"claims": [{"name": "gpu"}]}}}, "claims"),
        ({"test": {"apiKeySecret": {"name": "keys"}}}, "apiKeySecret"),
        ({"httpRoute": {"requestTimeout": "10"}}, "requestTimeout"),
        ({"router": {"responseStore": {"type": "disk"}}}, "responseStore"),
        ({"router": {"settings": {"response_store": "/x"}}}, "response_store"),
        ({"networkPolicy": {"dnsPorts": []}}, "dnsPorts"),
        ({"sharedRouter": {"enabled": "yes"}}, "sharedRouter"),
        ({"sharedRouter": {"splits": [{"name": "a b", "weights": {"m": 1}}]}}, r"splits[./]0[./]name"),
        ({"sharedRouter": {"splits": [{"name": "s", "weights": {}}]}}, r"splits[./]0[./]weights"),
        ({"sharedRouter": {"splits": [{"name": "s", "weights": {"m": -1}}]}}, r"splits[./]0[./]weights[./]m"),
        ({"models": [{**MODEL, "aliases": ["a b"]}]}, r"models[./]0[./]aliases[./]0"),
        ({"models": [{**MODEL, "hold": "no"}]}, r"models[./]0[./]hold"),
        ({"models": [{**MODEL, "limits": {"requestsPerHour": 1}}]}, "requestsPerHour"),
        ({"models": [{**MODEL, "toolParser": "lama3"}]}, "toolParser"),
        ({"router": {"settings": {"models_file": "/x"}}}, "models_file"),
    ),
)
def test_bad_values_are_refused_by_both_helms(either_helm: Path, over: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        render(either_helm, over=over)


TWO_MODELS = [{"name": name, "source": {"type": "hub", "id": name}} for name in ("one", "two")]
KEDA = {"type": "keda", "kedaTrigger": "metrics-api"}
FOLLOWS = {"type": "keda", "kedaTrigger": "prometheus", "slo": True}
ROUTE = {"enabled": True, "parentRefs": [{"name": "public"}]}


@pytest.mark.parametrize(
    ("over", "message"),
    (
        ({"models": TWO_MODELS}, "must name its model, one of one, two"),
        ({"decode": {"pools": [{**POOL, "model": "thre"}]}}, 'names the model "thre", but models has smollm2-135m'),
        (
            {"models": TWO_MODELS, "prefill": {"pools": []}, "decode": {"pools": [{**POOL, "model": "one"}]}},
            "model two has no decode pool",
        ),
        ({"decode": {"pools": [POOL, POOL]}}, "two decode pools are called default"),
        ({"workers": {"autoscaling": {"type": "hpa", "minReplicas": 0}}}, "an HPA cannot scale to zero"),
        ({"workers": {"autoscaling": {"type": "hpa", "minReplicas": 9}}}, "minReplicas 9 is above maxReplicas 4"),
        (
            {"decode": {"pools": [POOL, {"name": "more"}], "defaults": {"autoscaling": KEDA}}},
            "has several decode pools, and a router counts them together",
        ),
        (
            {"decode": {"pools": [POOL, {"name": "more"}], "defaults": {"autoscaling": {"type": "planner"}}}},
            "has several decode pools, and its router plans them as one",
        ),
        ({"prefill": {"defaults": {"autoscaling": {"type": "planner"}}}}, "needs a decode pool with the same"),
        ({"workers": {"accelerator": {"vendor": "intel"}}}, "needs accelerator.device"),
        ({"fullnameOverride": "x" * 60}, "characters, Kubernetes takes 63"),
        ({"tls": {"certManager": {"enabled": True}}}, "needs tls.certManager.issuerRef.name"),
        ({"monitoring": {"serviceMonitor": {"enabled": True}}}, "everything would be counted twice"),
        ({"workers": {"autoscaling": {**KEDA, "slo": True}}}, "autoscaling.slo needs kedaTrigger prometheus"),
        ({"decode": {"defaults": {"autoscaling": FOLLOWS}}}, "and slo.tpotMs of model smollm2-135m"),
        ({"fullnameOverride": "1st"}, "a Service cannot be called 1st-"),
        ({"workers": {"strategy": {"maxSurge": "0%"}}}, "prefill pool default: strategy.maxSurge and"),
        ({"router": {"strategy": {"maxSurge": 0}}}, "router of model smollm2-135m: strategy.maxSurge and"),
        ({"prefill": {"defaults": {"autoscaling": {**KEDA, "target": 0}}}}, "the smallest is 0.001"),
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
    ),
)
def test_what_does_not_fit_together_is_refused_with_a_sentence(helm4: Path, over: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused) as refused:
        render(helm4, over=over)
    assert message in str(refused.value)


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
    from common import __version__

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == __version__


def notes_of(helm: Path, home: Path, *flags: str) -> str:
    """NOTES.txt is only shown by install; a dry run on the client renders it without a cluster."""
    line = [str(helm), "install", "demo", str(CHART), "--namespace", "llm", "--dry-run=client", *flags]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, env={"HOME": str(home), "PATH": ""})
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]


def test_notes_say_how_to_try_it(helm4: Path, tmp_path: Path) -> None:
    notes = notes_of(helm4, tmp_path)
    assert "port-forward service/demo-diptych-router-smollm2-135m" in notes and "helm test demo" in notes
    assert "longer ones are cut" not in notes


def test_notes_warn_of_answers_that_an_update_would_cut(helm4: Path, tmp_path: Path) -> None:
    assert RouterConfig(decode=("tcp://d:1",)).request_timeout_s == 600  # what NOTES.txt takes it for
    notes = notes_of(helm4, tmp_path, "--set", "router.settings.request_timeout_s=900")
    assert "gives its answers 600 s (drainSeconds), though one may take 900 s" in notes

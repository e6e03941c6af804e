"""Objects of operators have the fields, and only those, that the operators' own types know."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from .chart import EXAMPLES, Object, Rendered, render
from .custom_types import PACKAGES, package, problems, shape_of
from .programs import NotAvailable

pytestmark = [pytest.mark.helm, pytest.mark.slow]


def check(item: Object) -> list[str]:
    group, _, version = item["apiVersion"].partition("/")
    try:
        file = package(group) / group / version / f"{item['kind']}.d.ts"
    except NotAvailable as error:
        pytest.skip(str(error))
    return problems(item, shape_of(file.resolve()), item["kind"])


def custom(rendered: Rendered) -> list[Object]:
    return [item for item in rendered.objects if item["apiVersion"].partition("/")[0] in PACKAGES]


def everything(helm: Path) -> list[Object]:
    monitors = {"podMonitor": {"enabled": False}, "serviceMonitor": {"enabled": True}}
    rendered = [render(helm, name) for name in EXAMPLES]
    return [item for each in (*rendered, render(helm, over={"monitoring": monitors})) for item in custom(each)]


def test_every_field_of_every_custom_resource_exists(helm4: Path) -> None:
    found = everything(helm4)
    kinds = {"ScaledObject", "PodMonitor", "ServiceMonitor", "PrometheusRule", "HTTPRoute", "Certificate"}
    assert {item["kind"] for item in found} == kinds
    for item in found:
        assert not check(item)


def test_a_misspelt_field_would_be_found(helm4: Path) -> None:
    scaled = next(item for item in everything(helm4) if item["kind"] == "ScaledObject")
    wrong = copy.deepcopy(scaled)
    wrong["spec"]["fallback"]["behaviour"] = wrong["spec"]["fallback"].pop("behavior")
    wrong["spec"]["triggers"][0]["metadata"]["threshold"] = 1
    wrong["spec"]["pollingInterval"] = "10"
    assert len(check(wrong)) == 3


def test_an_inference_pool_leads_to_router_pods(helm4: Path) -> None:
    picker = {"enabled": True, "endpointPicker": {"name": "epp", "port": 9002}}
    rendered = render(helm4, over={"inferencePool": picker})
    (pool,) = rendered.of("InferencePool")
    assert set(pool["spec"]) == {"selector", "targetPorts", "endpointPickerRef"}
    reference = pool["spec"]["endpointPickerRef"]
    assert reference == {"name": "epp", "port": {"number": 9002}, "failureMode": "FailOpen"}
    template = rendered.named("Deployment", pool["metadata"]["name"])["spec"]["template"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert pool["spec"]["targetPorts"] == [{"number": template["spec"]["containers"][0]["ports"][0]["containerPort"]}]


def test_a_route_may_lead_to_the_inference_pool(helm4: Path) -> None:
    picker = {"enabled": True, "endpointPicker": {"name": "epp", "port": 9002}}
    route = {"enabled": True, "parentRefs": [{"name": "public"}], "toInferencePool": True, "requestTimeout": ""}
    rendered = render(helm4, over={"inferencePool": picker, "httpRoute": route})
    ((found,), (pool,)) = (rendered.of(kind) for kind in ("HTTPRoute", "InferencePool"))
    assert not check(found)
    (rule,) = found["spec"]["rules"]
    group = pool["apiVersion"].partition("/")[0]
    target = {"name": pool["metadata"]["name"], "group": group, "kind": "InferencePool", "weight": 100}
    assert rule["backendRefs"] == [target] and "timeouts" not in rule

"""Pools whose replicas a router sets: what the chart tells a router of one model, and one of several, about them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from common.config import RouterConfig
from common.config.sources import Sources

from .chart import OPERATORS, Refused, Rendered, render, settings_of
from .test_shared_router import NAME, checksum, model, values

pytestmark = pytest.mark.helm

PLANNED = {"type": "planner", "minReplicas": 0, "maxReplicas": 6}
OF_A_MODEL = {"planner_lease"} | {
    f"{what}{role}{end}"
    for role in ("prefill", "decode")
    for what, end in (("min_", ""), ("max_", ""), ("price_", ""), ("", "_deployment"))
}
"""Settings of which each model behind a shared router has its own."""


def scaled(**more: Any) -> dict[str, Any]:
    """A pool that the router scales."""
    return {"autoscaling": PLANNED | more}


def two_models(*, prefill: Any = None, decode: Any = None, other: Any = None, **over: Any) -> dict[str, Any]:
    """`a` with both of its pools planned, and `b` with a decode pool of a fixed size; one router serves both."""
    pools = {"default": None, "a": scaled() if decode is None else decode, "b": other or {}}
    first = {"default": None, "a": scaled() if prefill is None else prefill}
    return values(model("a"), model("b"), prefill={"pools": first}, decode={"pools": pools}, **over)


def tables(rendered: Rendered) -> dict[str, dict[str, Any]]:
    """What the file of models says of each model's plan."""
    models = tomllib.loads(rendered.named("ConfigMap", NAME)["data"]["models.toml"])["model"]
    return {one["name"]: {key: one[key] for key in OF_A_MODEL & one.keys()} for one in models}


def rights(rendered: Rendered) -> dict[str, list[str]]:
    """The names that the router's Role has for each kind of object that it may change."""
    rules = rendered.named("Role", "demo-diptych-router")["rules"]
    return {rule["resources"][0]: sorted(rule["resourceNames"]) for rule in rules if "resourceNames" in rule}


def test_a_shared_router_is_told_of_each_model_s_pools_in_the_file_of_models(helm4: Path) -> None:
    over = two_models(
        prefill=scaled(price=0.25),
        decode=scaled(price=2),
        other={"autoscaling": {"type": "planner"}},
        router={"settings": {"max_cost": 12}},
    )
    rendered = render(helm4, over=over)
    prefill, decode, other = (f"demo-diptych-{pool}" for pool in ("prefill-a", "decode-a", "decode-b"))
    assert tables(rendered) == {
        "a": {"planner_lease": "demo-diptych-planner-a", "prefill_deployment": prefill, "decode_deployment": decode}
        | {"min_prefill": 0, "max_prefill": 6, "min_decode": 0, "max_decode": 6}
        | {"price_prefill": 0.25, "price_decode": 2},
        "b": {"planner_lease": "demo-diptych-planner-b", "decode_deployment": other, "min_decode": 1, "max_decode": 4},
    }
    settings = settings_of(rendered, rendered.named("Deployment", NAME))
    assert (settings["planner"], settings["max_cost"]) == ("kubernetes", 12)
    assert not OF_A_MODEL & settings.keys()
    for name in (prefill, decode, other):
        assert "replicas" not in rendered.named("Deployment", name)["spec"], "an upgrade leaves them alone"


@pytest.mark.slow
def test_a_shared_router_may_scale_the_pools_that_it_plans_and_no_others(helm4: Path) -> None:
    keda = {"autoscaling": {"type": "keda"}}
    rendered = render(helm4, over=two_models(other=keda, discovery={"type": "dns"}))
    assert tables(rendered)["b"] == {}
    assert [item["metadata"]["name"] for item in rendered.of("ScaledObject")] == ["demo-diptych-decode-b"]
    assert rights(rendered) == {
        "deployments/scale": ["demo-diptych-decode-a", "demo-diptych-prefill-a"],
        "leases": ["demo-diptych-planner-a"],
    }
    pod = rendered.named("Deployment", NAME)["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"]
    assert pod["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/health", "a pool may be at zero"
    way = rendered.named("NetworkPolicy", "demo-diptych-router")
    assert any(port["port"] == 6443 for rule in way["spec"]["egress"] for port in rule.get("ports", ()))


@pytest.mark.slow
def test_leases_are_those_of_all_models_that_a_router_plans(helm4: Path) -> None:
    rendered = render(helm4, over=two_models(other=scaled(), sharedRouter={"enabled": True, "defaultModel": "b"}))
    assert rights(rendered) == {
        "deployments/scale": ["demo-diptych-decode-a", "demo-diptych-decode-b", "demo-diptych-prefill-a"],
        "leases": ["demo-diptych-planner-a", "demo-diptych-planner-b"],
    }


@pytest.mark.slow
def test_a_shared_router_of_one_model_has_its_plan_in_the_file_too(helm4: Path) -> None:
    """So that a second model is no other kind of release."""
    pools = {"default": None, "a": scaled()}
    rendered = render(helm4, over=values(model("a"), decode={"pools": pools}))
    assert tables(rendered)["a"]["decode_deployment"] == "demo-diptych-decode-a"
    settings = settings_of(rendered, rendered.named("Deployment", NAME))
    assert settings["planner"] == "kubernetes" and not OF_A_MODEL & settings.keys()


@pytest.mark.slow
def test_where_nothing_is_planned_nothing_is_said_of_a_plan(helm4: Path) -> None:
    rendered = render(helm4, over=two_models(prefill={}, decode={}))
    assert tables(rendered) == {"a": {}, "b": {}}
    assert "planner" not in settings_of(rendered, rendered.named("Deployment", NAME))
    assert rights(rendered) == {}


@pytest.mark.slow
def test_a_changed_plan_rolls_the_shared_router(helm4: Path) -> None:
    """A running router takes none of it from the file."""
    first = checksum(render(helm4, over=two_models()))
    others = (
        two_models(prefill=scaled(price=0.5)),
        two_models(decode=scaled(minReplicas=1)),
        two_models(decode=scaled(maxReplicas=7)),
        two_models(prefill={}),
        two_models(other=scaled()),
    )
    found = {checksum(render(helm4, over=over)) for over in others}
    assert len(found) == len(others) and first not in found
    # Who else scales `b`, and how far, is nothing to the router.
    assert checksum(render(helm4, over=two_models(other={"autoscaling": {"type": "keda"}}))) == first
    assert checksum(render(helm4, over=two_models(other={"autoscaling": {"type": "none", "price": 3}}))) == first


@pytest.mark.slow
def test_a_worker_over_several_pods_is_scaled_as_a_set(helm4: Path) -> None:
    spread = {"tensorParallelSize": 4, "rankHosts": 2}
    rendered = render(
        helm4,
        over=two_models(decode=scaled() | spread, workers={"engine": "vllm", "accelerator": {"vendor": "nvidia"}}),
        apis=(*OPERATORS, "leaderworkerset.x-k8s.io/v1"),
    )
    table = tables(rendered)["a"]
    assert table["decode_deployment"] == "leaderworkersets/demo-diptych-decode-a"
    assert table["prefill_deployment"] == "demo-diptych-prefill-a"
    found = rights(rendered)
    assert found["leaderworkersets/scale"] == ["demo-diptych-decode-a"]
    assert found["deployments/scale"] == ["demo-diptych-prefill-a"]


@pytest.mark.slow
def test_a_router_of_one_model_has_prices_in_its_settings(helm4: Path, tmp_path: Path) -> None:
    rendered = render(
        helm4,
        over={
            "prefill": {"pools": {"default": scaled(price=0.001)}},
            "decode": {"pools": {"default": scaled(price=1)}},
        },
    )
    router = rendered.named("Deployment", "demo-diptych-router-smollm2-135m")
    settings = settings_of(rendered, router)
    assert settings["price_prefill"] == 0.001 and "price_decode" not in settings
    assert settings["planner_lease"] == "demo-diptych-planner-smollm2-135m"
    file = tmp_path / "diptych.toml"
    file.write_text(rendered.named("ConfigMap", router["metadata"]["name"])["data"]["diptych.toml"])
    config = RouterConfig(**Sources.open(str(file), {}, RouterConfig).values(RouterConfig))
    assert (config.price_prefill, config.price_decode) == (0.001, 1)


@pytest.mark.slow
def test_the_largest_price_stays_a_whole_number(helm4: Path) -> None:
    """YAML through Helm makes 1e+09 of it."""
    rendered = render(helm4, over=two_models(decode=scaled(price=1_000_000_000)))
    assert "price_decode = 1000000000\n" in rendered.named("ConfigMap", NAME)["data"]["models.toml"]


@pytest.mark.parametrize("shared", (pytest.param(True, marks=pytest.mark.slow), False), ids=("shared", "own"))
def test_a_price_that_is_said_twice_is_refused(helm4: Path, shared: bool) -> None:
    over = two_models(decode=scaled(price=3), router={"settings": {"price_decode": 2}})
    said = "settings.price_decode and autoscaling.price of the decode pool both set the price of a pod of model a"
    router = "the shared router" if shared else "router of model a"
    with pytest.raises(Refused, match=f"{router}: {said}: use the latter"):
        render(helm4, over=over | {"sharedRouter": {"enabled": shared}})

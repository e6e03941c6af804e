"""One router for all models of a release: what the chart makes of it, and what it refuses."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.models.adapters_file import AdapterEntry, adapters_of
from router.models.catalog import Catalog
from router.models.models_file import ModelEntry, ModelTable, read_models

from ..rig import wait_until
from .chart import Refused, Rendered, render, settings_of
from .cluster import Cluster, running, small_values
from .test_values import notes_of

pytestmark = pytest.mark.helm

NAME = "demo-diptych-router-shared"


Model = tuple[str, dict[str, Any]]


def model(name: str, **over: Any) -> Model:
    return name, {"source": {"id": f"org/{name}"}} | over


def values(*models: Model, splits: tuple[dict[str, Any], ...] = (), **over: Any) -> dict[str, Any]:
    """A release with a shared router and a decode pool for each model."""
    pools: dict[str, Any] = {"default": None} | {name: {} for name, _ in models}
    base = {"models": dict(models), "sharedRouter": {"enabled": True, "splits": list(splits)}}
    return base | {"prefill": {"pools": {"default": None}}, "decode": {"pools": pools}} | over


def table_of(rendered: Rendered, folder: Path) -> ModelTable:
    """The file of models as a router reads it."""
    file = folder / "models.toml"
    file.write_text(rendered.named("ConfigMap", NAME)["data"]["models.toml"])
    return read_models(str(file))


def checksum(rendered: Rendered) -> str:
    pod = rendered.named("Deployment", NAME)["spec"]["template"]
    return str(pod["metadata"]["annotations"]["checksum/config"])


def test_all_models_are_behind_one_router(helm4: Path, tmp_path: Path) -> None:
    rendered = render(helm4, "shared-router")
    routers = [item for item in rendered.of("Deployment") if "-router-" in item["metadata"]["name"]]
    assert [item["metadata"]["name"] for item in routers] == [NAME]
    settings = settings_of(rendered, routers[0])
    assert not {"model", "served_model_name", "slo_ttft_ms"} & settings.keys()
    assert settings["models_file"] == "/etc/diptych/config/models.toml"
    assert settings["decode_services"] == [f"demo-diptych-decode-{name}" for name in ("canary", "large", "small")]
    assert settings["prefill_services"] == ["demo-diptych-prefill-large"]
    table = table_of(rendered, tmp_path)
    small, canary, large = table.models
    assert small == ModelEntry(
        "HuggingFaceTB/SmolLM2-135M-Instruct", "small", ("fast",), has_prefill=False, limits=small.limits
    )
    assert (large.fallbacks, canary.fallbacks) == (("small",), ("meta-llama/Meta-Llama-3-8B-Instruct",))
    assert (large.slo_ttft_ms, large.slo_tpot_ms, large.has_prefill) == (800.0, 50.0, True)
    assert (canary.reasoning_start, canary.reasoning_end, canary.reasoning_in_form) == ("<think>", "</think>", None)
    assert not canary.holds and canary.tool_parser == "llama3" and canary.limits.tokens_per_minute == 1_000_000
    assert dict(table.splits[0].weights) == {"llama-3-8b-canary": 5.0, "meta-llama/Meta-Llama-3-8B-Instruct": 95.0}
    ids = [one.model.rpartition("/")[2] if one.model.startswith("/") else one.model for one in table.models]
    assert Catalog(table, ids).has("chat")


def test_workers_call_their_model_as_the_router_does(helm4: Path, tmp_path: Path) -> None:
    rendered = render(helm4, "shared-router")
    router = {one.name: one.model for one in table_of(rendered, tmp_path).models}
    for name, served in (("large", "meta-llama/Meta-Llama-3-8B-Instruct"), ("canary", "llama-3-8b-canary")):
        deployment = rendered.named("Deployment", f"demo-diptych-decode-{name}")
        path = settings_of(rendered, deployment)["model"]
        assert path == router[served]
        for pod in (deployment, rendered.named("Deployment", NAME)):
            mounts = pod["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
            assert any(path.startswith(f"{mount['mountPath']}/") for mount in mounts)


@pytest.mark.slow
def test_a_router_fetches_each_model_of_the_hub(helm4: Path) -> None:
    rendered = render(helm4, over=values(model("a"), model("b")))
    spec = rendered.named("Deployment", NAME)["spec"]["template"]["spec"]
    fetches = {container["name"]: container["args"] for container in spec["initContainers"]}
    assert fetches == {"fetch-a": ["org/a", "--no-weights"], "fetch-b": ["org/b", "--no-weights"]}


@pytest.mark.slow
def test_models_share_a_cache_that_all_of_them_name(helm4: Path) -> None:
    def cache(*claims: str) -> Any:
        models = [
            model(f"m{number}", source={"id": f"m{number}", "cacheClaim": claim}) for number, claim in enumerate(claims)
        ]
        volumes = render(helm4, over=values(*models)).named("Deployment", NAME)["spec"]["template"]["spec"]["volumes"]
        return next(volume for volume in volumes if volume["name"] == "cache")

    assert cache("one", "one")["persistentVolumeClaim"] == {"claimName": "one"}
    assert cache("one", "two")["emptyDir"] == {}


@pytest.mark.slow
def test_only_what_a_running_router_does_not_take_restarts_it(helm4: Path, tmp_path: Path) -> None:
    first = checksum(render(helm4, over=values(model("a"), model("b"))))
    live = values(
        model("a", aliases=["x"], fallbacks=["b"], hold=False, limits={"tokensPerMinute": 7}),
        model("b"),
        splits=({"name": "s", "weights": {"a": 1, "b": 0.5}},),
    )
    assert checksum(render(helm4, over=live)) == first
    others = (
        [model("a"), model("c")],
        [model("a", servedName="x"), model("b")],
        [model("a", toolParser="hermes"), model("b")],
        [model("a", chatTemplate="/models/own.jinja"), model("b")],
        [model("a", slo={"ttftMs": 100}), model("b")],
        [model("a", reasoningStart="Let me think:", reasoningEnd="◁/think▷", reasoningInForm=False), model("b")],
    )
    rendered = [render(helm4, over=values(*models)) for models in others]
    assert first not in map(checksum, rendered)
    assert table_of(rendered[3], tmp_path).models[0].chat_template == "/models/own.jinja"
    marked = table_of(rendered[5], tmp_path).models[0]
    assert (marked.reasoning_start, marked.reasoning_end) == ("Let me think:", "◁/think▷")
    assert marked.reasoning_in_form is False


@pytest.mark.slow
def test_autoscalers_and_series_are_those_of_each_model(helm4: Path) -> None:
    rendered = render(helm4, "shared-router")
    triggers = rendered.named("ScaledObject", "demo-diptych-prefill-large")["spec"]["triggers"]
    for trigger in triggers:
        assert trigger["metadata"]["url"].startswith(f"http://{NAME}.llm.svc:")
        assert 'model_name="meta-llama/Meta-Llama-3-8B-Instruct"' in trigger["metadata"]["valueLocation"]
    (endpoint,) = rendered.named("PodMonitor", "demo-diptych-router")["spec"]["podMetricsEndpoints"]
    models = {rule["regex"]: rule["replacement"] for rule in endpoint["metricRelabelings"]}
    assert models["meta-llama/Meta-Llama-3-8B-Instruct"] == "large" and models["small"] == "small"
    assert {rule["targetLabel"] for rule in endpoint["metricRelabelings"]} == {"diptych_model"}
    assert "metricRelabelings" not in str(render(helm4).of("PodMonitor"))
    dotted = render(helm4, over=values(model("a", servedName="m-1.5"))).named("PodMonitor", "demo-diptych-router")
    assert dotted["spec"]["podMetricsEndpoints"][0]["metricRelabelings"][0]["regex"] == r"m-1\.5"


@pytest.mark.slow
def test_a_router_that_may_hold_requests_for_one_model_takes_them(helm4: Path) -> None:
    def path(**scaling: Any) -> str:
        pools = {"default": None, "a": {}, "b": {"autoscaling": {"type": "keda"} | scaling}}
        rendered = render(helm4, over=values(model("a"), model("b"), decode={"pools": pools}))
        container = rendered.named("Deployment", NAME)["spec"]["template"]["spec"]["containers"][0]
        return str(container["readinessProbe"]["httpGet"]["path"])

    assert (path(minReplicas=1), path(minReplicas=0)) == ("/ready", "/health")


@pytest.mark.slow
def test_routes_need_no_model_and_refuse_an_unknown_one(helm4: Path) -> None:
    routes = {
        "ingress": {"enabled": True, "hosts": [{"host": "a"}, {"host": "b", "model": "b"}]},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
        "inferencePool": {"enabled": True, "endpointPicker": {"name": "epp", "port": 9002}},
        "tls": {"certManager": {"enabled": True, "issuerRef": {"name": "ca"}}},
    }
    rendered = render(helm4, over=values(model("a"), model("b"), **routes))
    (ingress,), (route,), (pool,), (certificate,) = (
        rendered.of(kind) for kind in ("Ingress", "HTTPRoute", "InferencePool", "Certificate")
    )
    hosts = [rule["http"]["paths"][0]["backend"]["service"]["name"] for rule in ingress["spec"]["rules"]]
    assert hosts == [NAME, NAME] and route["spec"]["rules"][0]["backendRefs"][0]["name"] == NAME
    labels = rendered.named("Deployment", NAME)["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ends = ("", ".llm", ".llm.svc", ".llm.svc.cluster.local")
    assert certificate["spec"]["dnsNames"] == [NAME + end for end in ends]
    with pytest.raises(Refused, match='ingress host b names the model "c", but models has a, b'):
        hosts_of_c = {"enabled": True, "hosts": [{"host": "b", "model": "c"}]}
        render(helm4, over=values(model("a"), model("b"), ingress=hosts_of_c))


PVC = {"claimName": "c", "path": "snapshot"}
PLANNED = {"autoscaling": {"type": "planner"}}


@pytest.mark.slow_except("over0-*", "over5-*", "over9-*")
@pytest.mark.parametrize(
    ("over", "message"),
    (
        (values(model("a", router={"replicas": 2})), "model a: router configures the model's own router"),
        (values(model("a", fallbacks=["c"])), 'fallbacks of model a names the model "c", but models has a'),
        (values(model("a"), splits=({"name": "s", "weights": {"c": 1}},)), 'split s names the model "c"'),
        (values(model("a"), splits=({"name": "s", "weights": {"a": 0}},)), "split s: at least one of weights"),
        (values(model("a"), splits=({"name": "a", "weights": {"a": 1}},)), "split a: the name is used twice"),
        (values(model("a"), model("b", aliases=["a"])), "model b: the name a is used twice"),
        (values(model("a", servedName="a b")), 'servedName "a b" needs up to 256 printable ASCII characters'),
        (
            values(model("a", source=PVC), model("b", source=PVC)),
            "model b: another model is also named snapshot, by its id or folder",
        ),
        (
            values(model("a"), model("b"), prefill={"pools": {"default": None, "a": PLANNED}}),
            "model a: a prefill pool with autoscaling.type planner needs a decode pool with the same",
        ),
        (
            values(model("a"), router={"replicas": 2, "responseStore": {"type": "memory"}}),
            "the shared router: responseStore.type memory needs one replica",
        ),
        (
            {"models": dict([model("a", aliases=["x"])]), "sharedRouter": {"enabled": False}},
            "model a: aliases needs sharedRouter.enabled",
        ),
        ({"sharedRouter": {"splits": [{"name": "s", "weights": {"a": 1}}]}}, "sharedRouter.splits needs sharedRouter"),
        ({"sharedRouter": {"defaultModel": "b"}}, "sharedRouter.defaultModel is b, but models has smollm2-135m"),
    ),
)
def test_what_one_router_cannot_have_is_refused_with_a_sentence(
    helm4: Path, over: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused) as refused:
        render(helm4, over=over)
    assert message in str(refused.value)


@pytest.mark.slow
def test_notes_name_the_models(helm4: Path, tmp_path: Path) -> None:
    split = {"name": "chat", "weights": {"a": 1, "b": 1}}
    file = tmp_path / "values.json"
    given = values(model("a"), model("b", servedName="org/b"), splits=(split,))
    file.write_text(json.dumps(given))
    notes = notes_of(helm4, tmp_path, "-f", str(file), models=True)
    assert "Models a, org/b, by the field `model`; splits chat. Wait until the router is ready" in notes
    assert f"port-forward service/{NAME}" in notes and '-d \'{"model": "a"' in notes


def two_models(*, aliases: list[str]) -> dict[str, Any]:
    """Two tiny models, the second without a prefill pool."""
    sources = {"first": "tiny-random", "second": "tiny-random-gemma3"}
    models: dict[str, Any] = {name: {"source": {"id": source}} for name, source in sources.items()}
    models["first"] |= {"aliases": aliases, "fallbacks": ["second"]}
    models["second"] |= {"limits": {"requestsPerMinute": 600}}
    pools: dict[str, Any] = {"decode": {"pools": {"default": None, "first": {}, "second": {}}}}
    pools["prefill"] = {"defaults": {"drainSeconds": 20}, "pools": {"default": None, "first": {}}}
    split = {"name": "both", "weights": {"first": 1, "second": 1}}
    base = small_values(**pools) | {"models": models, "sharedRouter": {"enabled": True, "splits": [split]}}
    base["router"]["settings"] = {"queue_timeout_s": 60}
    return base


@pytest.fixture(scope="module")
def cluster(helm4: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with running(render(helm4, over=two_models(aliases=["one"])), tmp_path_factory.mktemp("shared")) as found:
        yield found


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_rendered_router_serves_all_models_and_takes_a_changed_file(cluster: Cluster, helm4: Path) -> None:
    (router,) = cluster.of("router")
    client = httpx.Client(base_url=f"http://{router.address}:8000", trust_env=False, timeout=60)

    def ask(name: str) -> httpx.Response:
        body = {"model": name, "prompt": "hi", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        return client.post("/v1/completions", json=body)

    def listed() -> dict[str, bool]:
        return {one["id"]: one["ready"] for one in client.get("/v1/models").json()["data"]}

    wait_until(lambda: all(listed().values()), "both models have workers")
    assert list(listed()) == ["first", "one", "second", "both"]
    assert [ask(name).json()["model"] for name in ("first", "one", "second")] == ["first", "first", "second"]
    loads = {name: client.get(f"/load?model={name}").json() for name in ("first", "second")}
    assert {name: sorted(one["role"] for one in load["workers"]) for name, load in loads.items()} == {
        "first": ["decode", "prefill"],
        "second": ["decode"],
    }
    assert client.get("/ready").json()["detail"] == ""  # a model without a prefill pool lacks none
    changed = render(helm4, over=two_models(aliases=["other"]))
    assert checksum(changed) == checksum(cluster.rendered)
    file = router.folder / "etc" / "config" / "models.toml"
    text = changed.named("ConfigMap", NAME)["data"]["models.toml"]
    assert tomllib.loads(text) != tomllib.loads(file.read_text())
    file.write_text(text)
    wait_until(lambda: "other" in listed(), "the router reads the changed ConfigMap")
    assert (ask("other").status_code, ask("one").status_code) == (200, 404)
    client.close()


# ---------------------------------------------------------------- LoRA adapters of a model

LORAS: dict[str, Any] = {"workers": {"settings": {"max_loras": 2}}}


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_router_follows_the_adapters_of_its_models(helm4: Path, shared: bool) -> None:
    adapters = {"sql": {"path": "/models/sql", "revision": "2"}, "Poems": {"path": "/models/poems"}, "gone": None}
    models = model("small", adapters=adapters, servedName="fast"), model("large")
    given = values(*models, **LORAS) | ({} if shared else {"sharedRouter": {"enabled": False}})
    rendered = render(helm4, over=given)
    name = NAME if shared else "demo-diptych-router-small"
    text = rendered.named("ConfigMap", name)["data"]["adapters.toml"]
    found = {AdapterEntry("sql", "/models/sql", "fast", "2"), AdapterEntry("Poems", "/models/poems", "fast")}
    assert set(adapters_of("adapters.toml", text.encode())) == found
    settings = settings_of(rendered, rendered.named("Deployment", name))
    assert settings["lora_file"] == "/etc/diptych/config/adapters.toml"


def test_a_change_of_adapters_restarts_no_router(helm4: Path) -> None:
    def annotation(**adapters: Any) -> tuple[str, str]:
        rendered = render(helm4, over=values(model("small", adapters=adapters), **LORAS))
        return checksum(rendered), rendered.named("ConfigMap", NAME)["data"]["adapters.toml"]

    (before, some), (after, none) = annotation(sql={"path": "/models/sql"}), annotation()
    assert before == after and some != none
    assert adapters_of("adapters.toml", none.encode()) == ()
    assert "adapters.toml" not in render(helm4, over=values(model("small"))).named("ConfigMap", NAME)["data"]


@pytest.mark.slow_except("adapters0-*", "adapters3-*")
@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ({"a b": {"path": "/a"}}, "a b"),
        ({"a": {}}, "path"),
        ({"a": {"path": ""}}, "path"),
        ({"a": {"rank": 3}}, "rank"),
    ],
)
def test_adapters_that_no_router_would_take_are_refused(helm4: Path, adapters: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        render(helm4, over=values(model("small", adapters=adapters)))

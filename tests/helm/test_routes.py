"""The ways in: what they publish, and that each address leads to one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router.request.paths import GENERATING

from .chart import Refused, Rendered, render

pytestmark = [pytest.mark.helm, pytest.mark.slow]

INGRESS = {"enabled": True, "hosts": [{"host": "llm.example.com"}]}
ROUTE = {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["llm.example.com"]}
TWO_MODELS: dict[str, Any] = {
    "models": {name: {"source": {"id": name}} for name in ("one", "two")},
    "prefill": {"pools": {"default": None}},
    "decode": {"pools": {"default": None, "one": {}, "two": {}}},
}
PRIVATE = ("/metrics", "/load", "/dashboard", "/reset_prefix_cache", "/ready", "/openapi.json", "/")


def published(rendered: Rendered) -> list[list[str]]:
    """The prefixes of the Ingress and of the HTTPRoute."""
    (ingress,), (route,) = rendered.of("Ingress"), rendered.of("HTTPRoute")
    paths = [path["path"] for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]]
    matches = [match["path"]["value"] for rule in route["spec"]["rules"] for match in rule["matches"]]
    return [paths, matches]


def test_only_paths_of_the_apis_are_published(helm4: Path) -> None:
    for prefixes in published(render(helm4, over={"ingress": INGRESS, "httpRoute": ROUTE})):
        for path in (*GENERATING, "/v1/models/org/name", "/tokenize", "/v1/batches"):
            assert any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes), path
        for path in PRIVATE:
            assert not any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes), path


def test_an_operator_may_publish_others(helm4: Path) -> None:
    over = {"ingress": INGRESS, "httpRoute": ROUTE, "publicPaths": ["/"]}
    assert published(render(helm4, over=over)) == [["/"], ["/"]]
    hosts = {"enabled": True, "hosts": [{"host": "llm.example.com", "path": "/v1/chat"}]}
    assert published(render(helm4, over={"ingress": hosts, "httpRoute": ROUTE}))[0] == ["/v1/chat"]


def test_two_models_at_one_address_are_refused(helm4: Path) -> None:
    hosts = [{"host": "a", "model": "one"}, {"host": "a", "model": "two"}]
    with pytest.raises(Refused, match="ingress.hosts routes a/v1 to two models, .*sharedRouter.enabled"):
        render(helm4, over=TWO_MODELS | {"ingress": {"enabled": True, "hosts": hosts}})
    apart = [hosts[0], hosts[1] | {"path": "/two"}]
    assert render(helm4, over=TWO_MODELS | {"ingress": {"enabled": True, "hosts": apart}}).of("Ingress")
    with pytest.raises(Refused, match=r"two of httpRoute.rules have the same matches, .*sharedRouter.enabled"):
        render(helm4, over=TWO_MODELS | {"httpRoute": ROUTE | {"rules": [{"model": "one"}, {"model": "two"}]}})


def test_a_canary_does_not_share_traffic_with_itself(helm4: Path) -> None:
    backend = {"name": "demo-diptych-router-smollm2-135m", "port": 80, "weight": 5}
    with pytest.raises(Refused, match="is this release's own Service. A canary is a release without a route"):
        render(helm4, over={"httpRoute": ROUTE | {"backends": [backend]}})
    elsewhere = backend | {"namespace": "other"}
    (route,) = render(helm4, over={"httpRoute": ROUTE | {"backends": [elsewhere]}}).of("HTTPRoute")
    assert len(route["spec"]["rules"][0]["backendRefs"]) == 2


def test_the_certificate_has_every_name_of_the_service(helm4: Path) -> None:
    over = {"tls": {"certManager": {"enabled": True, "issuerRef": {"name": "ca"}}}, "clusterDomain": "k8s.internal"}
    (certificate,) = render(helm4, over=over).of("Certificate")
    name = "demo-diptych-router-smollm2-135m"
    assert certificate["spec"]["dnsNames"] == [name, f"{name}.llm", f"{name}.llm.svc", f"{name}.llm.svc.k8s.internal"]

"""The manifests of docs/guides/gitops.md: their values render, and what they name is what `make release` pushes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from .chart import Object, UniqueKeys, render

pytestmark = pytest.mark.helm


@pytest.fixture
def manifests(repository: Path) -> dict[str, Object]:
    """By kind."""
    page = (repository / "docs" / "guides" / "gitops.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    found = [yaml.load(block, UniqueKeys) for block in blocks]
    return {item["kind"]: item for item in found}


def values(manifests: dict[str, Object], kind: str) -> dict[str, Any]:
    spec = manifests[kind]["spec"]
    found: dict[str, Any] = spec["values"] if kind == "HelmRelease" else spec["source"]["helm"]["valuesObject"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("Application", "HelmRelease"))
def test_the_values_of_the_page_render(kind: str, manifests: dict[str, Object], helm4: Path) -> None:
    over = values(manifests, kind)
    over["models"]["smollm2-135m"] = None
    rendered = render(helm4, over=over)
    assert len(rendered.of("Job")) == len(rendered.of("PersistentVolumeClaim")) == 1
    assert 'image: "registry.example.com/llm/diptych-router:' in rendered.text


def test_the_chart_is_where_a_release_pushes_it(manifests: dict[str, Object]) -> None:
    source = manifests["Application"]["spec"]["source"]
    registry = values(manifests, "Application")["images"]["registry"]
    assert f"{source['repoURL']}/{source['chart']}" == f"{registry}/charts/diptych"
    assert manifests["OCIRepository"]["spec"]["url"] == f"oci://{registry}/charts/diptych"
    assert manifests["HelmRelease"]["spec"]["chartRef"]["name"] == manifests["OCIRepository"]["metadata"]["name"]


@pytest.mark.slow
def test_what_an_autoscaler_sets_is_left_to_it(manifests: dict[str, Object], helm4: Path) -> None:
    """Argo CD renders without a cluster to ask: the field is absent, and a difference in it is ignored."""
    (ignored,) = manifests["Application"]["spec"]["ignoreDifferences"]
    assert ignored["kind"] == "Deployment" and ignored["jsonPointers"] == ["/spec/replicas"]
    assert "RespectIgnoreDifferences=true" in manifests["Application"]["spec"]["syncPolicy"]["syncOptions"]
    rendered = render(helm4, over={"workers": {"autoscaling": {"type": "hpa"}}})
    assert "replicas" not in rendered.named("Deployment", "demo-diptych-decode-default")["spec"]

"""The Kustomize base is what the chart renders, less what an overlay decides; the example is such an overlay."""

from __future__ import annotations

import copy
import difflib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from .chart import CHART, Object, UniqueKeys

pytestmark = pytest.mark.helm

FOLDER = CHART / "kustomize"
BASE = FOLDER / "base" / "diptych.yaml"
HEADER = "# Rendered from the chart and values.yaml: UPDATE_GOLDEN=1 pytest tests/helm/test_kustomize.py\n"
SETTINGS = ("ConfigMap", "diptych-decode-default")
OF_HELM = ("app.kubernetes.io/managed-by", "helm.sh/chart")


def without_helm(item: Object) -> Object:
    """An object as an overlay takes it: no namespace, no labels of Helm's, pods that look where they are."""
    item = copy.deepcopy(item)
    del item["metadata"]["namespace"]
    pod = item.get("spec", {}).get("template", {}).get("metadata", {})
    for labels in (item["metadata"]["labels"], pod.get("labels", {})):
        for key in OF_HELM:
            labels.pop(key, None)
    for subject in item.get("subjects", ()):
        subject["namespace"] = "default"  # kustomize puts the overlay's own there
    if text := item.get("data", {}).get("diptych.toml"):
        kept = [line for line in text.splitlines() if not line.startswith("discovery_namespace")]
        item["data"]["diptych.toml"] = "\n".join(kept) + "\n"
    return item


def base(helm: Path) -> str:
    """What belongs into base/diptych.yaml."""
    values = str(FOLDER / "base" / "values.yaml")
    command = [str(helm), "template", "diptych", str(CHART), "--kube-version", "1.37", "-f", values]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    objects = [item for item in yaml.load_all(done.stdout, UniqueKeys) if item]
    own = [item for item in objects if "helm.sh/hook" not in item["metadata"].get("annotations", {})]
    own = [without_helm(item) for item in own if item["metadata"]["labels"]["app.kubernetes.io/name"] == "diptych"]
    return HEADER + yaml.dump_all(own, Dumper=yaml.CSafeDumper, sort_keys=False, width=120)


@pytest.fixture(scope="module")
def built() -> Iterator[list[Object]]:
    """The objects of the example overlay."""
    kubectl = shutil.which("kubectl") or pytest.skip("kubectl is not installed")
    done = subprocess.run([kubectl, "kustomize", str(FOLDER / "example")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    yield [item for item in yaml.load_all(done.stdout, UniqueKeys) if item]


@pytest.mark.slow
def test_the_base_is_what_the_chart_renders(helm4: Path) -> None:
    text = base(helm4)
    if os.environ.get("UPDATE_GOLDEN"):
        BASE.write_text(text, encoding="utf-8")
    lines = difflib.unified_diff(BASE.read_text(encoding="utf-8").splitlines(), text.splitlines(), lineterm="", n=2)
    assert not (changed := list(lines)), "\n".join(changed[:60])


def test_the_base_runs_no_image_of_somebody_else_s_and_names_no_namespace() -> None:
    text = BASE.read_text(encoding="utf-8")
    images = {line.strip() for line in text.splitlines() if line.strip().startswith("image:")}
    assert images == {f"image: registry.invalid/diptych-{kind}" for kind in ("router:0.1.0", "worker:0.1.0-cpu")}
    for item in yaml.load_all(text, UniqueKeys):
        assert "namespace" not in item["metadata"] and "Helm" not in str(item["metadata"])
    assert "discovery_namespace" not in text


@pytest.mark.slow
def test_the_overlay_builds(built: list[Object]) -> None:
    named = {(item["kind"], item["metadata"]["name"]): item for item in built}
    assert {item["metadata"]["namespace"] for item in built} == {"llm"}
    binding = named["RoleBinding", "diptych-router"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "diptych-router", "namespace": "llm"}]
    decode = named["Deployment", "diptych-decode-default"]["spec"]
    assert decode["replicas"] == 2
    (container,) = decode["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["memory"] == "12Gi"
    images = [each["image"] for item in built for each in pod_containers(item)]
    assert images and all(image.startswith("registry.example.com/diptych-") for image in images)


def pod_containers(item: Object) -> list[dict[str, Any]]:
    spec = item.get("spec", {}).get("template", {}).get("spec", {})
    return [*spec.get("initContainers", ()), *spec.get("containers", ())]


@pytest.mark.slow
def test_a_setting_that_the_overlay_changes_keeps_the_others(built: list[Object]) -> None:
    """The ConfigMap is replaced as a whole: the example must hold every setting that the base has."""
    original, changed = (
        next(item for item in items if (item["kind"], item["metadata"]["name"]) == SETTINGS)
        for items in (yaml.load_all(BASE.read_text(encoding="utf-8"), UniqueKeys), built)
    )
    before, after = (set(item["data"]["diptych.toml"].splitlines()) for item in (original, changed))
    assert before < after and len(after - before) == 1

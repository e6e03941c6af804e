"""Labels: the user's beside the chart's own, and which of them pods have."""

from __future__ import annotations

from pathlib import Path

import pytest

from .chart import EXAMPLES, render

pytestmark = pytest.mark.helm


@pytest.mark.slow
def test_labels_of_the_user_s_are_there_and_selectors_untouched(helm4: Path) -> None:
    over = {
        "commonLabels": {"team": "llm", "app.kubernetes.io/part-of": "platform", "diptych/pool": "elsewhere"},
        "workers": {"podLabels": {"team": "decoders", "app.kubernetes.io/name": "elsewhere"}},
        "monitoring": {"rules": {"labels": {"team": "watch"}, "alertLabels": {"severity": "page"}}},
        "router": {"podAnnotations": {"prometheus.io/port": "1"}},
    }
    rendered = render(helm4, over={**over, "monitoring": {**over["monitoring"], "scrapeAnnotations": True}})
    decode = rendered.named("Deployment", "demo-diptych-decode-default")
    labels = decode["spec"]["template"]["metadata"]["labels"]
    assert (labels["team"], labels["diptych/pool"], labels["app.kubernetes.io/name"]) == (
        "decoders",
        "default",
        "diptych",
    )
    assert decode["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert decode["metadata"]["labels"]["app.kubernetes.io/part-of"] == "platform"
    (rules,) = rendered.of("PrometheusRule")
    assert rules["metadata"]["labels"]["team"] == "watch"
    assert {rule["labels"]["severity"] for rule in rules["spec"]["groups"][1]["rules"]} == {"page"}
    router = rendered.named("Deployment", "demo-diptych-router-smollm2-135m")["spec"]["template"]["metadata"]
    assert router["annotations"]["prometheus.io/port"] == "1"


@pytest.mark.slow_except("laptop")
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_new_chart_alone_restarts_nothing(helm4: Path, example: str) -> None:
    for deployment in render(helm4, example).of("Deployment"):
        assert "helm.sh/chart" in deployment["metadata"]["labels"]
        changing = {"helm.sh/chart", "app.kubernetes.io/version"}
        assert not changing & deployment["spec"]["template"]["metadata"]["labels"].keys()


@pytest.mark.slow
def test_another_name_of_the_chart_is_in_names_and_selectors(helm4: Path) -> None:
    rendered = render(helm4, over={"nameOverride": "serving"})
    deployment = rendered.named("Deployment", "demo-serving-decode-default")
    assert deployment["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"] == "serving"
    assert not [item for item in rendered.objects if "diptych" in item["metadata"]["name"]]

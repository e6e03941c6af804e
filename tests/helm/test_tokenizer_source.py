"""Routers need no weights: a source of their own spares them the model's volume."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from .chart import Refused, render, settings_of

pytestmark = [pytest.mark.helm, pytest.mark.slow]

LARGE: dict[str, Any] = {"source": {"claimName": "models", "path": "llama"}, "tokenizer": {"id": "meta/llama"}}
ROUTER = "demo-diptych-router-m"


def volumes_of(deployment: dict[str, Any]) -> set[str]:
    return {volume["name"] for volume in deployment["spec"]["template"]["spec"]["volumes"]}


def test_a_router_fetches_its_tokenizer_and_mounts_no_model(helm4: Path) -> None:
    rendered = render(helm4, over={"models": {"m": LARGE}})
    router, decode = (rendered.named("Deployment", name) for name in (ROUTER, "demo-diptych-decode-default"))
    assert settings_of(rendered, router)["model"] == "meta/llama"
    assert "model" not in volumes_of(router) and "model" in volumes_of(decode)
    (fetch,) = router["spec"]["template"]["spec"]["initContainers"]
    assert fetch["args"] == ["meta/llama", "--no-weights"]
    assert settings_of(rendered, decode)["model"] == "/models/llama"
    assert "initContainers" not in decode["spec"]["template"]["spec"]


def test_only_routers_may_reach_the_hub_then(helm4: Path) -> None:
    rendered = render(helm4, over={"models": {"m": LARGE}, "networkPolicy": {"hubPorts": [8443]}})
    reach = {
        role: "8443" in str(rendered.named("NetworkPolicy", f"demo-diptych-{role}")["spec"]["egress"])
        for role in ("router", "prefill", "decode", "test")
    }
    assert reach == {"router": True, "prefill": False, "decode": False, "test": False}


def test_a_shared_router_needs_the_name_that_workers_say(helm4: Path) -> None:
    with pytest.raises(Refused, match="model m: its tokenizer is named meta/llama and its source llama"):
        render(helm4, over={"models": {"m": LARGE}, "sharedRouter": {"enabled": True}})
    same = LARGE | {"tokenizer": {"claimName": "tokenizers", "path": "small/llama"}}
    rendered = render(helm4, over={"models": {"m": same}, "sharedRouter": {"enabled": True}})
    router = rendered.named("Deployment", "demo-diptych-router-shared")
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in router["spec"]["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    assert claims == ["tokenizers"]
    text = rendered.named("ConfigMap", "demo-diptych-router-shared")["data"]["models.toml"]
    assert tomllib.loads(text)["model"][0]["model"] == "/models/m/small/llama"

"""Pools with `engine: vllm`: image, arguments, ports of ranks, and combinations that are refused."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from common.config import DecodeWorkerConfig, PrefillWorkerConfig, fields_of
from common.config.sources import Sources
from common.config.vllm import MEANINGLESS
from helm.write_schema import CHART_SETS

from .chart import CHART, NEEDED, OPERATORS, Object, Refused, Rendered, render, settings_of
from .test_network_policies import allowed

pytestmark = pytest.mark.helm
NVIDIA: Object = {"accelerator": {"vendor": "nvidia"}}


@pytest.fixture(scope="module")
def rendered(helm4: Path) -> Rendered:
    return render(helm4, "vllm")


def pod_of(rendered: Rendered, role: str) -> Object:
    pod: Object = rendered.named("Deployment", f"demo-diptych-{role}-default")["spec"]["template"]
    return pod


def test_workers_run_vllm_with_the_arguments_of_their_pool(rendered: Rendered) -> None:
    for role, cls, size in (("prefill", PrefillWorkerConfig, 4), ("decode", DecodeWorkerConfig, 8)):
        toml = rendered.named("ConfigMap", f"demo-diptych-{role}-default")["data"]["diptych.toml"]
        config = cls(**Sources(tomllib.loads(toml), {}).values(cls))
        assert (config.engine, config.tensor_parallel_size) == ("vllm", size)
        assert config.engine_args[:1] == ("--enable-expert-parallel",)
        (worker,) = pod_of(rendered, role)["spec"]["containers"]
        assert worker["image"] == "ghcr.io/acme/diptych-worker:0.1.0-cuda-vllm"
        assert worker["resources"]["limits"]["nvidia.com/gpu"] == size
        assert worker["startupProbe"]["periodSeconds"] * worker["startupProbe"]["failureThreshold"] == 3600
        volumes = {volume["name"]: volume for volume in pod_of(rendered, role)["spec"]["volumes"]}
        assert volumes["shm"]["emptyDir"]["sizeLimit"] == "16Gi"


def test_each_rank_of_a_decode_worker_receives_kv(rendered: Rendered) -> None:
    labels = {role: pod_of(rendered, role)["metadata"]["labels"] for role in ("prefill", "decode")}
    ports = {
        port["name"]: port["containerPort"] for port in pod_of(rendered, "decode")["spec"]["containers"][0]["ports"]
    }
    assert ports["kv"] == 7010
    assert all(allowed(rendered, labels["prefill"], labels["decode"], port) for port in range(7010, 7018))
    assert not allowed(rendered, labels["prefill"], labels["decode"], 7018)


@pytest.mark.parametrize("transport", ("nixl", "shm"))
def test_workers_use_any_transport_that_vllm_has(helm4: Path, transport: str) -> None:
    workers = {"engine": "vllm", **NVIDIA, "hostPID": True, "settings": {"kv_transport": transport}}
    found = render(helm4, over=NEEDED | {"workers": workers})
    assert settings_of(found, found.named("Deployment", "demo-diptych-decode-default"))["kv_transport"] == transport
    (worker,) = pod_of(found, "decode")["spec"]["containers"]
    assert worker["image"].endswith("-cuda-vllm")


def test_a_model_from_the_hub_is_fetched_for_vllm(helm4: Path) -> None:
    models = {"one": {"source": {"id": "org/one"}}}
    found = render(helm4, over=NEEDED | {"models": models, "workers": {"engine": "vllm", **NVIDIA}})
    (fetch,) = pod_of(found, "decode")["spec"]["initContainers"]
    assert fetch["args"] == ["org/one", "--engine", "vllm"]


@pytest.mark.slow_except("workers0-*", "workers5-*")
@pytest.mark.parametrize(
    ("workers", "says"),
    [
        ({"accelerator": {"vendor": "none"}}, "no worker image is built for accelerator.vendor none with engine vllm"),
        ({"kvDisk": {"enabled": True}}, "kvDisk.enabled needs engine diptych"),
        ({"hostNetwork": True, "tensorParallelSize": 2}, "would need a port of the node for each rank"),
        ({"settings": {"kv_transport": "cuda-ipc"}}, "kv_transport is cuda-ipc, which workers with engine vllm do not"),
        ({"settings": {"quantization": "none"}}, "settings.quantization has no meaning with engine vllm"),
        ({"engineArgs": ["-tp", "4"]}, "use tensorParallelSize"),
        ({"engineArgs": ["--pipeline-parallel-size=2"]}, "one device for each of its tensorParallelSize ranks"),
        ({"engine": "diptych", "engineArgs": ["--seed", "1"]}, "engineArgs needs engine vllm"),
    ],
)
def test_values_that_vllm_does_not_have_are_refused(helm4: Path, workers: Object, says: str) -> None:
    with pytest.raises(Refused, match=re.escape(says)):
        over = NEEDED | {"workers": {"engine": "vllm", **NVIDIA, **workers}}
        render(helm4, over=over, apis=(*OPERATORS, "leaderworkerset.x-k8s.io/v1"))


def test_pools_with_different_engines_are_refused(helm4: Path) -> None:
    over: dict[str, Any] = NEEDED | {"workers": NVIDIA, "prefill": {"defaults": {"engine": "vllm"}}}
    with pytest.raises(Refused, match=r"cannot exchange KV, because they have engine .*: set the same engine in both"):
        render(helm4, over=over)


def test_the_chart_and_the_workers_refuse_the_same_settings() -> None:
    template = (CHART / "templates" / "_checks.tpl").read_text(encoding="utf-8")
    (listed,) = re.findall(r"As in common/config/vllm\.py\. \*/}}\n{{- range \$name := list ([^}]*) }}", template)
    in_file = {field.name for cls in (PrefillWorkerConfig, DecodeWorkerConfig) for field in fields_of(cls)}
    assert set(re.findall(r'"(\w+)"', listed)) | CHART_SETS >= set(MEANINGLESS)
    assert set(re.findall(r'"(\w+)"', listed)) <= set(MEANINGLESS) & in_file

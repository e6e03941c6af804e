"""Settings of discovery and of pods: what is refused, and how it is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.config import DecodeWorkerConfig, RouterConfig
from common.config.sources import read
from common.errors import ConfigError


@pytest.fixture(autouse=True)
def not_in_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "POD_NAME", "POD_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"decode_services": ("d",)}, "discovery='static': must be dns or kubernetes"),
        ({"discovery": "dns", "decode": ("tcp://a:1",)}, "discovery='dns': must be static with --prefill"),
        ({"discovery": "dns", "decode_services": ("d",)}, "decode_services='d': must be HOST:PORT"),
        ({"discovery": "dns", "decode_services": ("d:0",)}, "decode_services='d:0': must be HOST:PORT"),
        ({"discovery": "dns", "prefill_services": ("[fd00::1]",)}, "prefill_services='[fd00::1]': must be"),
        (
            {"discovery": "kubernetes", "prefill_services": ("p:7001",)},
            "prefill_services='p:7001': must be the name",
        ),
        (
            {"discovery": "kubernetes", "prefill_services": ("p",), "decode_services": ("p",)},
            "a name that is listed once",
        ),
        ({"discovery": "kubernetes", "decode_services": ("no way",)}, "names such as diptych-decode (kub"),
        ({"discovery_namespace": "x"}, "discovery_namespace='x': must be empty without"),
        ({"discovery": "kubernetes", "discovery_namespace": "Not-A-Name"}, "the name of a namespace"),
        ({"discovery": "consul"}, "one of static, dns, file, kubernetes"),
        ({"kubernetes_api": "10.0.0.1:443"}, "a URL such as"),
        ({"slo_tpot_ms": -1.0}, "slo_tpot_ms=-1.0: must be"),
    ],
)
def test_what_does_not_fit_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=".*") as caught:
        RouterConfig(**values)
    assert said in str(caught.value)


def test_addresses_of_dns() -> None:
    config = RouterConfig(discovery="dns", decode_services=("d.example:7001", "10.0.0.1:1", "[fd00::1]:7001"))
    config.check_start()


def credentials(folder: Path) -> Path:
    for name, text in (("token", "t"), ("ca.crt", ""), ("namespace", "serving\n")):
        (folder / name).write_text(text)
    return folder


def test_a_router_in_a_cluster_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--discovery", "kubernetes", "--decode-services", "diptych-decode"]
    with pytest.raises(ConfigError, match="because KUBERNETES_SERVICE_HOST is not set"):
        read(RouterConfig, flags, environ={})
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    flags += ["--kubernetes-credentials", str(tmp_path)]
    with pytest.raises(ConfigError, match="--kubernetes-credentials .*: must be a folder with a service account"):
        read(RouterConfig, flags, environ={})
    credentials(tmp_path)
    config = read(RouterConfig, flags, environ={})
    assert config.cluster.url == "https://[fd00::1]:6443"
    assert config.cluster.namespace("", "discovery_namespace") == "serving"
    (tmp_path / "namespace").unlink()
    with pytest.raises(ConfigError, match="missing --discovery-namespace: must be a namespace, because"):
        read(RouterConfig, flags, environ={})
    read(RouterConfig, [*flags, "--discovery-namespace", "other"], environ={})


def test_a_port_that_cannot_be_is_refused() -> None:
    flags = ["--discovery", "kubernetes", "--decode-services", "d", "--kubernetes-api", "http://10.0.0.1:99999"]
    with pytest.raises(ConfigError, match="invalid --kubernetes-api http://10.0.0.1:99999: must be .*0-65535"):
        read(RouterConfig, flags, environ={})


def test_a_router_needs_a_pool_to_decode() -> None:
    with pytest.raises(ConfigError, match="--decode-services '': must be at least one name with --discovery dns"):
        read(RouterConfig, ["--discovery", "dns", "--decode-services", ""], environ={})
    prefill = ["--discovery", "dns", "--prefill-services", "p:1"]
    with pytest.raises(ConfigError, match="missing --decode-services: must be at least one name with --discovery dns"):
        read(RouterConfig, [*prefill, "--task", "generate"], environ={})
    config = read(RouterConfig, prefill, environ={})  # the model may be one that embeds: the router sees it later
    config.check_workers("prefill")
    with pytest.raises(ConfigError, match="decode_services=.*: must be at least one name with --discovery dns"):
        config.check_workers("decode")


def test_a_worker_that_keeps_its_cost_must_know_its_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--pod-deletion-cost", "--kubernetes-api", "http://127.0.0.1:1", "--kubernetes-credentials", str(tmp_path)]
    with pytest.raises(ConfigError, match="invalid --pod-deletion-cost: must be false without POD_NAME"):
        read(DecodeWorkerConfig, flags, environ={})
    monkeypatch.setenv("POD_NAME", "decode-1")
    with pytest.raises(ConfigError, match="POD_NAMESPACE='': must be"):
        read(DecodeWorkerConfig, flags, environ={})
    monkeypatch.setenv("POD_NAMESPACE", "serving")
    read(DecodeWorkerConfig, flags, environ={})

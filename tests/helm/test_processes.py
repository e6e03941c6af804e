"""The rendered chart runs: its commands, files, environment, probes and test, as real processes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from .chart import Rendered, render
from .cluster import Cluster, Secrets, running, small_values

pytestmark = [pytest.mark.helm, pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.slow]


KEY = "dk-of-the-chart-s-own-test"
SECRETS = {
    "apiKeys": {"existingSecret": "keys"},
    "curve": {"existingSecret": "curve"},
    "tls": {"existingSecret": "certificate"},
    "test": {"apiKeySecret": {"name": "keys", "key": "plain"}},
}


@pytest.fixture(scope="module")
def rendered(helm4: Path) -> Rendered:
    return render(helm4, "laptop", over=small_values(**SECRETS))


def make_secrets(folder: Path) -> Secrets:
    """What an operator makes by hand: a key pair for the sockets, a file of API keys, a certificate."""
    diptych = str(Path(sys.executable).with_name("diptych"))
    subprocess.run([diptych, "keygen", str(folder / "curve.key")], check=True, capture_output=True, timeout=60)
    keys = f'[[key]]\nname = "test"\nsha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"\n'
    certificate = trustme.CA().issue_cert("localhost")
    chain = b"".join(part.bytes() for part in certificate.cert_chain_pems)
    return {
        "keys": {"api-keys.toml": keys.encode()},
        "curve": {"curve.key": (folder / "curve.key").read_bytes()},
        "certificate": {"tls.crt": chain, "tls.key": certificate.private_key_pem.bytes()},
    }


@pytest.fixture(scope="module")
def cluster(rendered: Rendered, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with running(rendered, folder, make_secrets(folder)) as cluster:
        yield cluster


def helm_test(cluster: Cluster, tmp_path: Path, timeout_s: int) -> subprocess.CompletedProcess[str]:
    """The `helm test` pod, its Service names turned into the addresses of this machine."""
    (pod,) = cluster.rendered.of("Pod")
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["python", "-P", "/test/check_request.py"]
    file = tmp_path / "check_request.py"
    file.write_text(cluster.rendered.named("ConfigMap", pod["metadata"]["name"])["data"]["check_request.py"])
    arguments = []
    for argument in container["args"]:
        for name, each in cluster.containers.items():
            argument = argument.replace(f"{name}:80", f"{each.address}:8000") if "-router-" in name else argument
            argument = argument.replace(f"{name}:", f"{each.address}:")
        arguments.append(argument)
    assert container["env"] == [{"name": "API_KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "plain"}}}]
    line = [sys.executable, "-P", str(file), *arguments, f"--timeout-s={timeout_s}"]
    environment = {**os.environ, "API_KEY": KEY}
    return subprocess.run(line, capture_output=True, text=True, timeout=200, env=environment)


def test_pods_start_and_the_chart_s_own_test_passes(cluster: Cluster, tmp_path: Path) -> None:
    done = helm_test(cluster, tmp_path, timeout_s=60)
    assert done.returncode == 0, done.stdout + done.stderr + cluster.of("router")[0].log.read_text()[-3000:]
    assert "through both pools" in done.stdout
    assert all(container.probe("liveness") for container in cluster.containers.values())


def test_secrets_are_asked_for(cluster: Cluster) -> None:
    (router,) = cluster.of("router")
    url = f"https://{router.address}:8000"
    body = {"model": "tiny", "prompt": "short", "max_tokens": 1}
    assert httpx.post(f"{url}/v1/completions", json=body, verify=False, timeout=60).status_code == 401
    assert httpx.get(f"{url}/health", verify=False, timeout=60).status_code == 200
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{router.address}:8000/health", timeout=60)


def test_every_pod_ends_well_and_without_prefill_the_test_fails(cluster: Cluster, tmp_path: Path) -> None:
    """SIGTERM to each, as the kubelet sends it. The decode pool goes on alone, and the chart's test says so."""
    (prefill,), (decode,), (router,) = (cluster.of(role) for role in ("prefill", "decode", "router"))
    assert prefill.end() == 0, prefill.log.read_text()[-3000:]
    done = helm_test(cluster, tmp_path, timeout_s=1)
    assert done.returncode == 1 and "answered, but no prefill" in done.stdout, done.stdout + done.stderr
    for container in (decode, router):
        assert container.end() == 0, container.log.read_text()[-3000:]

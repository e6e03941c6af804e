"""The API client's TLS, against a server whose authority changes as kubelet's mounted files do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from common.cluster.access import ClusterAccess
from common.cluster.api import KubernetesClient, KubernetesError

from ...kubernetes_api import KubernetesAPI

pytestmark = pytest.mark.slow

PATH = "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices"
PARAMS = {"labelSelector": "kubernetes.io/service-name in (d)", "limit": "10"}


def trust(authority: trustme.CA, folder: Path) -> None:
    """Swap the CA's file as kubelet does: the old one is never half a file."""
    fresh = folder / "ca.crt.new"
    authority.cert_pem.write_to_path(fresh)
    os.replace(fresh, folder / "ca.crt")


Serve = Callable[[trustme.CA], KubernetesAPI]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts an API server with a certificate of an authority, in place of the one before."""
    api = KubernetesAPI(tmp_path / "serviceaccount")

    def start(authority: trustme.CA) -> KubernetesAPI:
        api.stop()
        pem = tmp_path / "server.pem"
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pem)
        api.ssl = {"ssl_certfile": str(pem), "ssl_keyfile": str(pem)}
        return api.start()

    yield start
    api.stop()


async def test_a_new_authority_is_read_and_a_foreign_one_refused(serve: Serve) -> None:
    first, second = trustme.CA(), trustme.CA()
    api = serve(first)
    trust(first, api.folder)
    client = KubernetesClient(ClusterAccess(api.url, api.folder))
    assert b"EndpointSliceList" in await client.get(PATH, PARAMS)
    serve(second)
    with pytest.raises(KubernetesError, match="certificate verify failed"):
        await client.get(PATH, PARAMS)
    trust(second, api.folder)
    assert b"EndpointSliceList" in await client.get(PATH, PARAMS)
    (api.folder / "ca.crt").write_text("half a file")
    with pytest.raises(KubernetesError):
        await client.get(PATH, PARAMS)
    trust(second, api.folder)
    await client.get(PATH, PARAMS)
    await client.close()


async def test_a_watch_ends_in_time_and_long_lines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api = KubernetesAPI(tmp_path / "serviceaccount").start()
    client = KubernetesClient(ClusterAccess(api.url, api.folder))
    watch = {**PARAMS, "watch": "1", "resourceVersion": "100"}
    lines: list[bytes] = []
    with pytest.raises(KubernetesError, match="no answer from .* within 0.2 s"):
        await client.watch(PATH, {**watch, "timeoutSeconds": "60"}, lines.append, 0.2)
    api.put("d", "d", [])
    await client.watch(PATH, {**watch, "timeoutSeconds": "0.2"}, lines.append, 20.0)
    assert len(lines) == 1 and b"ADDED" in lines[0]
    monkeypatch.setattr("common.cluster.api.MAX_BODY_BYTES", 10)
    with pytest.raises(KubernetesError, match="the answer exceeds 10 bytes"):
        await client.get(PATH, PARAMS)
    await client.close()
    api.stop()

"""A service whose every connection is IPv6: clients, control, KV, probes, and the slices that name the workers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.wire.listening import has_ipv6, listen

from .pods import NUM_TOKENS, Pods, answers, complete, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KUBERNETES = ("--discovery", "kubernetes", "--prefill-services", "prefill", "--decode-services", "decode")


def has_loopback() -> bool:
    try:
        listen("::1", 0, 1).close()
    except OSError:
        return False
    return has_ipv6()


@pytest.fixture(params=("::1", "::"), ids=("loopback", "all"))
def pods(request: pytest.FixtureRequest, tmp_path: Path, forge: None) -> Iterator[Pods]:
    if not has_loopback():
        pytest.skip("this machine has no ::1")
    pods = Pods(tmp_path, host="::1", listen=request.param)
    yield pods
    pods.close()


def test_a_request_passes_through_both_pools(pods: Pods) -> None:
    pods.start_router(*KUBERNETES)
    workers = [pods.add("prefill"), pods.add("decode")]
    assert all(worker.addresses["address"].startswith("tcp://[::1]:") for worker in workers)
    assert workers[1].addresses["kv_address"].startswith("tcp://[::1]:")
    until(lambda: answers(f"{pods.url}/ready"), "the router found its workers")
    until(lambda: sum(pods.metric("diptych_pool_workers", 'state="ready"')) == 2, "both are ready")
    assert len(complete(pods.url, [random.Random(6).randrange(256) for _ in range(200)])) == NUM_TOKENS
    assert pods.metric("diptych_placements_total", 'kind="remote"') == [1.0]
    pods.check_blocks()
    ports = [url.rpartition(":")[2] for url in (pods.url, *(worker.http_url for worker in workers))]
    ipv4 = "127.0.0.1" if pods.listen == "::" else "127.0.0.2"  # at 127.0.0.1 another process may have that port
    of_both = [answers(f"http://{ipv4}:{port}/health") for port in ports]
    assert of_both == [pods.listen == "::"] * 3  # the one wildcard serves both families

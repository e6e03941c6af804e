"""A router raises its file limit for its clients and for all workers that it may find."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable

import httpx
import pytest

from common.config import RouterConfig
from router.fleet.fleet import MAX_DISCOVERED
from router.server.server import connections_possible, files_needed

from ...rig import Program

LOW = 200
NOBODY = "tcp://127.0.0.1:9"


def test_workers_that_may_be_discovered_count() -> None:
    three = RouterConfig(decode=("tcp://a:1", "tcp://b:1"), prefill=("tcp://c:1",), max_connections=100)
    found = RouterConfig(discovery="dns", decode_services=("d:1",), max_connections=100)
    assert files_needed(three) > 100 + 3 * 4
    assert files_needed(found) - files_needed(three) == (MAX_DISCOVERED - 3) * 8


@pytest.mark.parametrize(("files", "connections"), [(100_000, 4096), (4000, 4000 - 256 - 8), (256, 128)])
def test_no_more_connections_than_descriptors(monkeypatch: pytest.MonkeyPatch, files: int, connections: int) -> None:
    """A client without a descriptor gets no answer; one without a place gets 503."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert connections_possible(RouterConfig(decode=(NOBODY,))) == connections
    with_tls = RouterConfig(decode=(NOBODY,), tls_cert="a.crt", tls_key="a.key")  # handshakes have descriptors too
    assert connections_possible(with_tls) == min(4096, (2 * connections if files == 100_000 else connections) // 2)


@pytest.mark.slow
@pytest.mark.e2e
def test_the_limit_is_raised_at_start_and_the_log_says_so(launch: Callable[..., Program]) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    flags = f"--port 0 --log-json --model tiny-random --decode {NOBODY} --max-connections 300"
    router = launch("sh", "-c", f"ulimit -Sn {LOW}; exec {sys.executable} -P -m router {flags}")
    raised = json.loads(router.wait_for_line("raised the limit of open files"))
    port = json.loads(router.wait_for_line('"listening"'))["port"]
    httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False, timeout=60)
    soft = resource.prlimit(router.pid, resource.RLIMIT_NOFILE)[0]
    wanted = files_needed(RouterConfig(decode=(NOBODY,), max_connections=300))
    assert soft == min(wanted, hard if hard != resource.RLIM_INFINITY else wanted)
    assert (raised["files"], raised["before"]) == (soft, LOW)

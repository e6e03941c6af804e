"""A real router that finds real workers through a Kubernetes API, while they come and go under load."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stack import StackProcess
from common.engine.worker.pod_deletion_cost import ANNOTATION

from .pods import NUM_TOKENS, PATIENCE_S, Load, Pods, answers, complete, get, until

pytestmark = pytest.mark.e2e


@pytest.fixture
def pods(tmp_path: Path, forge: None) -> Iterator[Pods]:
    pods = Pods(tmp_path)
    yield pods
    pods.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pools_grow_from_zero_and_change_under_load(pods: Pods) -> None:
    source = random.Random(7)
    prompts = [[source.randrange(256) for _ in range(length)] for length in (40, 90, 200, 350)]
    pods.start_router("--discovery", "kubernetes", "--prefill-services", "prefill", "--decode-services", "decode")
    until(lambda: answers(f"{pods.url}/health"), "the router answers")
    until(lambda: "has no endpoints" in get(f"{pods.url}/ready").text, "/ready says why")

    first: list[list[int]] = []
    waiting = threading.Thread(target=lambda: first.append(complete(pods.url, prompts[0])))
    waiting.start()
    until(lambda: pods.metric("diptych_requests_held", 'role="decode"') == [1.0], "a request is held")
    until(lambda: pods.metric("diptych_requests_held", 'role="prefill"') == [1.0], "the other pool is asked for too")
    decode = pods.add("decode")
    waiting.join(PATIENCE_S)
    expected = [complete(pods.url, prompt) for prompt in prompts]
    assert first == expected[:1]
    detail = get(f"{pods.url}/ready").json()["detail"]
    assert detail == "no prefill worker exists: the prefill service prefill has no endpoints"

    load = Load(pods.url, prompts)
    prefill = pods.add("prefill")
    pods.add("decode")
    load.more()
    pods.end(decode)
    load.more()
    pods.end(prefill)
    load.more()
    pods.add("prefill")
    load.more()
    until(lambda: int(pods.api.annotations.get("decode-3", {}).get(ANNOTATION, "0")) > 0, "a busy pod costs something")
    load.stop()
    assert not load.errors
    assert all(tokens == expected[index] for index, tokens in load.answers)
    everybody = {"decode-1", "prefill-2", "decode-3", "prefill-4"}
    until(lambda: pods.api.annotations.keys() == everybody, "every pod says what it costs")
    check_the_end(pods)


def check_the_end(pods: Pods) -> None:
    """The router forgets a worker that is gone, and the others own nothing."""
    until(lambda: len(get(f"{pods.url}/load").json()["workers"]) == 2, "two workers are known")
    until(lambda: sum(pods.metric("diptych_pool_workers", 'state="ready"')) == 2, "both are ready")
    assert not pods.metric("diptych_worker_state", "decode-1") and pods.metric("diptych_worker_state", "decode-3")
    serving = ("diptych_discovery_endpoints", 'role="decode"', 'state="serving"')
    until(lambda: pods.metric(*serving) == [1.0], "one decode worker is listed")
    assert pods.metric("diptych_discovery_syncs_total", 'result="failed"') == [0.0]
    assert pods.metric("diptych_slo_attainment_ratio") == [1.0, 1.0]
    assert len(pods.metric("diptych_pool_backlog_seconds")) == len(pods.metric("diptych_pool_pressure")) == 1
    pods.check_blocks()


@pytest.mark.slow
def test_names_are_looked_up(pods: Pods) -> None:
    ports = {role: pods.add(role).addresses["address"].rpartition(":")[2] for role in ("prefill", "decode")}
    names = {role: f"localhost:{port}" for role, port in ports.items()}
    pods.start_router(
        "--discovery", "dns", "--prefill-services", names["prefill"], "--decode-services", names["decode"]
    )
    until(lambda: answers(f"{pods.url}/ready"), "the router found its workers")
    until(lambda: sum(pods.metric("diptych_pool_workers", 'state="ready"')) == 2, "both are ready")
    assert len(complete(pods.url, list(range(50)))) == NUM_TOKENS
    assert pods.metric("diptych_placements_total", 'kind="remote"') == [1.0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--discovery", "kubernetes", "--decode-services", "d"], "kubernetes_api='' is refused"),
        (["--discovery", "dns", "--decode-services", "d"], "decode_services='d' is refused: HOST:PORT"),
        (["--decode-services", "d"], "discovery='static' is refused"),
    ],
)
def test_a_discovery_that_cannot_work_is_refused(flags: list[str], said: str, tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    router = StackProcess("router", "router", [sys.executable, "-P", "-m", "router", *flags], log)
    env: dict[str, Any] = {name: text for name, text in os.environ.items() if not name.startswith("KUBERNETES_")}
    router.start(env=env)
    router.wait(time.monotonic() + 60)
    assert router.returncode == 2
    assert said in log.read_text() and len(log.read_text().splitlines()) == 1

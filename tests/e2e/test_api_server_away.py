"""The API server is gone for more than a minute, under load, while a worker dies and another joins."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from .pods import Load, Pods, answers, complete, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

AWAY_S = 75.0
"""Longer than a minute, the time between two lists."""


@pytest.fixture
def pods(tmp_path: Path, forge: None) -> Iterator[Pods]:
    pods = Pods(tmp_path)
    yield pods
    pods.close()


def ready_decoders(pods: Pods) -> float:
    return sum(pods.metric("diptych_pool_workers", 'role="decode"', 'state="ready"'))


def known(pods: Pods, worker: str) -> bool:
    return bool(pods.metric("diptych_worker_state", worker))


def test_a_worker_dies_and_another_joins_while_nobody_can_say_so(pods: Pods) -> None:
    source = random.Random(11)
    prompts = [[source.randrange(256) for _ in range(length)] for length in (40, 120, 300)]
    pods.start_router("--discovery", "kubernetes", "--prefill-services", "prefill", "--decode-services", "decode")
    pods.add("prefill")
    dying, _ = pods.add("decode"), pods.add("decode")
    until(lambda: ready_decoders(pods) == 2, "both decode workers are ready")
    expected = [complete(pods.url, prompt) for prompt in prompts]
    load = Load(pods.url, prompts)
    load.more()

    pods.api.stop()
    back_at = time.monotonic() + AWAY_S
    load.more()
    dying.send_signal(signal.SIGKILL)
    until(lambda: ready_decoders(pods) == 1, "the dead worker is missed")
    pods.api.delete_worker("decode", dying.addresses["address"])  # in the cluster; the router cannot hear of it
    load.more()
    joined = pods.add("decode")  # likewise
    load.more()
    while time.monotonic() < back_at:
        assert ready_decoders(pods) == 1 and not known(pods, joined.name)
        assert answers(f"{pods.url}/ready") and not load.errors
        time.sleep(1)
    assert pods.metric("diptych_discovery_last_sync_age_seconds")[0] > 60
    assert pods.metric("diptych_discovery_syncs_total", 'result="failed"')[0] >= 2

    pods.api.start()
    until(lambda: ready_decoders(pods) == 2, "the new worker is found")
    until(lambda: not known(pods, dying.name), "the dead worker is forgotten")
    load.more()
    load.stop()
    assert not load.errors
    assert all(tokens == expected[index] for index, tokens in load.answers)
    assert len(httpx.get(f"{pods.url}/load", trust_env=False).json()["workers"]) == 3
    pods.check_blocks()

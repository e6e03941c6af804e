"""Traces of real requests through both pools."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from ..collector import Collector, attributes, seconds
from ..rig import wait_until
from .test_failures import ALL_REMOTE

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_where_the_time_went(system_of: Any, random_prompts: Any) -> None:
    with Collector().running() as collector:
        system = system_of(router_flags=(*ALL_REMOTE, "--otlp-traces-endpoint", collector.url))
        system.generate(random_prompts((600, 900), vocab_size=256, seed=1), max_tokens=40)
        system.generate(random_prompts((30,), vocab_size=256, seed=2), max_tokens=1)
        began = time.monotonic()
        router = system.stack.routers[0]
        router.terminate()
        router.wait(began + 60)
        assert not router.forced
        wait_until(lambda: len(collector.named(f"text_completion {system.stack.model}")) == 3, "all traces are sent")
        remote, alone = [], []
        for server in collector.named(f"text_completion {system.stack.model}"):
            phases = {span.name: span for span in collector.spans if span.parent_span_id == server.span_id}
            (remote if "decode" in phases else alone).append((server, phases))
            for span in phases.values():
                assert server.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
                assert span.end_time_unix_nano <= server.end_time_unix_nano
        assert (len(remote), len(alone)) == (2, 1)
        for server, phases in remote:
            assert (
                {"prefill", "kv_transfer", "decode"} <= phases.keys() <= {"queue", "prefill", "kv_transfer", "decode"}
            )
            workers = {name: attributes(span).get("diptych.worker") for name, span in phases.items()}
            assert workers["prefill"] != workers["decode"] == workers["kv_transfer"]
            assert phases["prefill"].end_time_unix_nano <= phases["decode"].end_time_unix_nano
            assert 0 < seconds(phases["prefill"]) + seconds(phases["decode"]) < seconds(server) * 2
            assert attributes(server)["gen_ai.usage.output_tokens"] == 40
        assert "kv_transfer" not in alone[0][1]


def test_a_router_ends_in_time_while_its_collector_hangs(system_of: Any) -> None:
    with Collector(delay_s=600).running() as collector:
        system = system_of(router_flags=("--otlp-traces-endpoint", collector.url))
        reply = httpx.post(f"{system.stack.url}/v1/completions", json={"prompt": "hi"}, trust_env=False, timeout=60)
        assert reply.status_code == 200
        router = system.stack.routers[0]
        router.terminate()
        router.wait(time.monotonic() + 60)
        assert not router.forced and router.returncode == 0

"""The router's gauges for autoscalers, against workers that follow a script."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.latency.step_model import StepModel
from common.wire.messages import PROTOCOL_VERSION
from router.fleet.discovery import DiscoveryStatus, Endpoint
from router.observe.collectors import PoolCollector
from router.observe.slo import SLOWindow


class Scraper:
    """A router's `/metrics`, as far as it is about the pools."""

    def __init__(self, dispatcher: Any, window: SLOWindow | None = None) -> None:
        self.registry, self.window = CollectorRegistry(), window or SLOWindow(0.0, 0.0)
        self.registry.register(PoolCollector(dispatcher, self.window, {"engine": "router"}))

    def __call__(self) -> dict[str, float]:
        families = text_string_to_metric_families(generate_latest(self.registry).decode())
        return {
            " ".join(
                [sample.name.removeprefix("diptych_"), *(v for k, v in sorted(sample.labels.items()) if k != "engine")]
            ): sample.value
            for family in families
            for sample in family.samples
        }


def listed(*workers: Any) -> list[Endpoint]:
    return [Endpoint(worker.role, worker.address) for worker in workers]


async def test_requests_held_wake_both_pools(cluster: Any, tools: Any) -> None:
    dispatcher = await cluster.start(1, 1)
    prefill, decode = cluster.workers
    prefill.beat["full_tokens_per_s"] = 200.0
    scrape = Scraper(dispatcher)
    await tools.until(lambda: dispatcher.fleet.registry.workers[prefill.address].load.beat.full_tokens_per_s == 200.0)
    assert scrape()["pool_workers prefill ready"] == 1
    dispatcher.fleet.reconcile([])
    await tools.until(lambda: not dispatcher.fleet.connections)
    tasks = [
        asyncio.create_task(tools.collect(dispatcher, tools.request(list(range(1, length)))))
        for length in (401, 201, 3)
    ]
    await tools.until(lambda: scrape()["requests_held decode"] == 3)
    found = scrape()
    assert found["requests_held prefill"] == 2, "one prompt is below the local threshold"
    assert found["pool_backlog_seconds prefill"] == 600 / 200.0
    assert found["pool_pressure prefill"] == pytest.approx(600 / 200.0 / 60.0)
    assert sum(found[f"pool_workers decode {state}"] for state in ("ready", "dead", "unknown")) == 0
    dispatcher.fleet.reconcile(listed(decode))
    await tools.until(lambda: scrape()["requests_held decode"] == 0)
    await asyncio.gather(*tasks)
    assert scrape()["pool_backlog_seconds prefill"] == 0


@pytest.mark.slow
async def test_a_prefill_pool_at_zero_is_asked_for_by_those_it_would_serve(cluster: Any, tools: Any) -> None:
    dispatcher = await cluster.start(1, 1)
    prefill, decode = cluster.workers
    decode.token_s = 0.02
    scrape = Scraper(dispatcher)
    dispatcher.fleet.reconcile(listed(decode))
    await tools.until(lambda: scrape()["pool_workers prefill ready"] == 0)
    task = asyncio.create_task(tools.collect(dispatcher, tools.request(max_tokens=30)))
    await tools.until(lambda: scrape()["requests_held prefill"] == 1)
    assert scrape()["requests_held decode"] == 0
    dispatcher.fleet.reconcile(listed(prefill, decode))
    await tools.until(lambda: scrape()["requests_held prefill"] == 0)
    await task


async def test_a_router_without_a_prefill_pool_asks_for_none(cluster: Any, tools: Any) -> None:
    dispatcher = await cluster.start(0, 0)
    scrape = Scraper(dispatcher)
    task = asyncio.create_task(tools.collect(dispatcher, tools.request()))
    await tools.until(lambda: scrape()["requests_held decode"] == 1)
    assert scrape()["requests_held prefill"] == scrape()["pool_backlog_seconds prefill"] == 0
    dispatcher.fleet.reconcile(listed(cluster.add("decode")))
    await task


async def test_pressure_is_summed_over_decode_workers(cluster: Any, tools: Any) -> None:
    for owned in (400, 80):
        cluster.add("decode").beat["num_owned_blocks"] = owned
    dispatcher = await cluster.start(0, 0)
    scrape = Scraper(dispatcher, SLOWindow(0.0, 0.1))
    assert scrape()["pool_pressure decode"] == pytest.approx(0.4 / 0.8 + 0.08 / 0.8)
    fast = StepModel(fixed_s=0.04, row_s=0.002, num_steps=9)  # 30 rows within the goal
    for worker, num_running in zip(cluster.workers, (24, 0), strict=True):
        worker.beat |= {"num_running": num_running, "step_model": fast}
    await tools.until(lambda: scrape()["pool_pressure decode"] == pytest.approx(24 / 30 * 100 / 88 + 0.1))
    assert scrape()["slo_attainment_ratio tpot"] == 1.0
    assert "slo_attainment_ratio ttft" not in scrape()
    dispatcher.fleet.reconcile([])
    await tools.until(lambda: scrape()["pool_pressure decode"] == 0)


async def test_an_endpoint_picker_reads_the_pools_at_the_router(cluster: Any, tools: Any) -> None:
    for role, running, waiting, owned in (("prefill", 2, 5, 900), ("decode", 7, 1, 400), ("decode", 3, 0, 100)):
        cluster.add(role).beat |= {"num_running": running, "num_waiting": waiting, "num_owned_blocks": owned}
    dispatcher = await cluster.start(0, 0)
    scrape = Scraper(dispatcher)
    assert (scrape()["vllm:num_requests_running"], scrape()["vllm:num_requests_waiting"]) == (12, 6)
    assert scrape()["vllm:kv_cache_usage_perc"] == pytest.approx(500 / 2000)
    dispatcher.fleet.reconcile([])
    await tools.until(lambda: scrape()["vllm:num_requests_running"] == 0)
    task = asyncio.create_task(tools.collect(dispatcher, tools.request()))
    await tools.until(lambda: scrape()["vllm:num_requests_waiting"] == 1)
    assert scrape()["vllm:kv_cache_usage_perc"] == 0
    dispatcher.fleet.reconcile(listed(cluster.workers[1]))
    await task


async def test_a_full_decode_pool_asks_for_no_prefill_worker(cluster: Any, tools: Any) -> None:
    """Prompts that no decode worker takes wait in the router, and computed ones in the prefill worker's memory."""
    dispatcher = await cluster.start(1, 0)
    prefill = cluster.workers[0]
    prefill.beat["full_tokens_per_s"] = 200.0
    scrape = Scraper(dispatcher)
    await tools.until(lambda: scrape()["pool_workers prefill ready"] == 1)
    task = asyncio.create_task(tools.collect(dispatcher, tools.request(list(range(1, 401)))))
    await tools.until(lambda: scrape()["requests_held decode"] == 1)
    assert scrape()["pool_backlog_seconds prefill"] == 0
    prefill.on_request = lambda router, message: True
    dispatcher.fleet.reconcile(listed(prefill, cluster.add("decode")))
    await tools.until(lambda: scrape()["pool_backlog_seconds prefill"] == 2.0)
    prefill.beat |= {"num_owned_blocks": 900, "num_transferring": 9}
    await tools.until(lambda: scrape()["pool_backlog_seconds prefill"] == pytest.approx(0.2))
    task.cancel()


async def test_an_unpaired_worker_shows_with_its_reason(cluster: Any, tools: Any) -> None:
    layout = (("dtype", "float32"), ("kv_cache_dtype", "fp8"))
    cluster.add("prefill", fingerprint="a", block_size=64, layout=layout)
    cluster.add("prefill", fingerprint="b", layout=(("dtype", "bfloat16"), ("kv_cache_dtype", "float32")))
    cluster.add("prefill", fingerprint="c")
    newer = cluster.add("decode", oldest_protocol=PROTOCOL_VERSION + 1, protocol=PROTOCOL_VERSION + 2)
    cluster.add("decode", layout=(("dtype", "float32"), ("kv_cache_dtype", "float32")))
    dispatcher = await cluster.start(1, 0, wait=False)
    scrape = Scraper(dispatcher)
    reasons = ("block_size prefill", "dtype prefill", "unknown prefill", "protocol decode")
    await tools.until(lambda: all(scrape().get(f"unpaired_workers {reason}") == 1 for reason in reasons))
    assert scrape()["unpaired_workers  decode"] == 0
    shown = {worker.address: worker.reason for worker in dispatcher.load().workers}
    assert shown[newer.address] == "protocol: it speaks versions 14 to 15, this router versions 12 to 13"
    assert "block_size 64 instead of 4, kv_cache_dtype fp8 instead of float32" in shown[cluster.workers[0].address]
    assert shown[cluster.workers[-1].address] == ""


async def test_what_discovery_sees(cluster: Any) -> None:
    dispatcher = await cluster.start(0, 1)
    scrape = Scraper(dispatcher)
    assert not [name for name in scrape() if name.startswith("discovery")]

    class Source:
        status = DiscoveryStatus("dns", {"d:1": "decode"}, 0.0)

    Source.status.failed("no such name", 5.0)
    Source.status.published([Endpoint("decode", "tcp://a:1"), Endpoint("decode", "tcp://b:1", serving=False)])
    dispatcher.fleet.source = Source()  # type: ignore[assignment]
    found = scrape()
    assert (found["discovery_endpoints decode serving"], found["discovery_endpoints decode unready"]) == (1, 1)
    assert (found["discovery_syncs_total failed"], found["discovery_syncs_total ok"]) == (1, 0)
    assert found["discovery_last_sync_age_seconds"] > 0

"""The dispatcher with workers that it only knows through a Kubernetes API."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.wire.messages import DecodeRequest

from ...kubernetes_api import KubernetesAPI

pytestmark = pytest.mark.slow


async def start(cluster: Any, api: KubernetesAPI) -> Any:
    """A router that knows of no worker but through the API."""
    services: dict[str, Any] = {"prefill_services": ("prefill",), "decode_services": ("decode",)}
    access = {"kubernetes_api": api.url, "kubernetes_credentials": str(api.folder)}
    return await cluster.start(0, 0, wait=False, discovery="kubernetes", **services, **access)


def add(cluster: Any, api: KubernetesAPI, role: str) -> Any:
    worker = cluster.add(role)
    api.put_worker(role, worker.address)
    return worker


def num_ready(dispatcher: Any) -> int:
    return sum(worker.state == "ready" for worker in dispatcher.load().workers)


async def test_a_request_that_came_before_any_worker(cluster: Any, tools: Any, api: KubernetesAPI) -> None:
    dispatcher = await start(cluster, api)
    request = tools.request()
    task = asyncio.create_task(tools.collect(dispatcher, request))
    reason = "no decode worker exists: the decode service decode has no endpoints"
    await tools.until(lambda: dispatcher.ready == (False, reason))
    add(cluster, api, "decode")
    tokens, _ = await task
    assert tokens == tools.expected(request.prompt_token_ids, 8)
    assert dispatcher.ready == (True, "no prefill worker exists: the prefill service prefill has no endpoints")
    add(cluster, api, "prefill")
    await tools.until(lambda: dispatcher.ready == (True, ""))


async def test_without_the_api_server_workers_die_and_return(cluster: Any, tools: Any, api: KubernetesAPI) -> None:
    dispatcher = await start(cluster, api)
    first, second = add(cluster, api, "decode"), add(cluster, api, "decode")
    await tools.until(lambda: num_ready(dispatcher) == 2)
    api.stop()
    await tools.until(lambda: dispatcher.fleet.source.status.error)
    first.die()
    await asyncio.gather(*(tools.collect(dispatcher, tools.request()) for _ in range(4)))
    await tools.until(lambda: num_ready(dispatcher) == 1)
    assert len(second.of(DecodeRequest)) >= 4
    await first.restart()
    await tools.until(lambda: num_ready(dispatcher) == 2)
    api.delete_worker("decode", second.address)
    api.start()
    await tools.until(lambda: list(dispatcher.fleet.connections) == [first.address])
    await tools.collect(dispatcher, tools.request())


async def test_a_pod_that_fails_its_probe_is_withheld_while_another_passes(
    cluster: Any, tools: Any, api: KubernetesAPI
) -> None:
    dispatcher = await start(cluster, api)
    failing, _ = cluster.add("decode"), add(cluster, api, "decode")
    api.put_worker("decode", failing.address, ready=False, serving=False)
    await tools.until(lambda: sorted(one.state for one in dispatcher.load().workers) == ["ready", "withheld"])
    (withheld,) = [one for one in dispatcher.load().workers if one.state == "withheld"]
    assert withheld.address == failing.address and "readiness probe failing" in withheld.reason
    api.put_worker("decode", failing.address)
    await tools.until(lambda: num_ready(dispatcher) == 2)

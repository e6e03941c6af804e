"""A flood of batch requests beside interactive ones: the former wait in the router, the latter do not wait for them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CLASSES = ("--request-class", "name=interactive,ttft_ms=20000,priority=5", "name=batch,priority=-5")
NUM_BATCH, NUM_INTERACTIVE, LENGTH = 80, 4, 1000


async def ask(http: httpx.AsyncClient, prompts: list[list[int]], name: str) -> None:
    """Four tokens for each prompt."""
    body = {"prompt": prompts, "max_tokens": 4, "ignore_eos": True, "request_class": name}
    reply = await http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 4 * len(prompts)


async def load_of(http: httpx.AsyncClient, name: str) -> dict[str, Any]:
    classes: list[dict[str, Any]] = (await http.get("/load")).json()["classes"]
    return next(one for one in classes if one["name"] == name)


async def workers_of(http: httpx.AsyncClient, role: str) -> list[dict[str, Any]]:
    return [worker for worker in (await http.get("/load")).json()["workers"] if worker["role"] == role]


async def flood(url: str, batch: list[list[int]], interactive: list[list[int]]) -> None:
    async with (
        httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http,
        asyncio.timeout(100),
        asyncio.TaskGroup() as tasks,
    ):
        while not all(worker["step_model"]["num_steps"] for worker in await workers_of(http, "prefill")):
            await ask(http, batch[:2], "batch")
        whole = tasks.create_task(ask(http, batch, "batch"))
        while (await load_of(http, "batch"))["num_held"] < NUM_BATCH // 4:
            assert not whole.done(), "the flood is over before it is one"
            await asyncio.sleep(0.01)
        for prompt in interactive:
            await ask(http, [prompt], "interactive")
        assert (await load_of(http, "batch"))["num_held"] > 0, "they waited for the whole flood"
        assert (await load_of(http, "interactive"))["attainment"] == {"ttft": 1.0}


@pytest.mark.timeout(120)
def test_interactive_requests_pass_a_flood_of_batch_requests(system_of: Any, random_prompts: Any) -> None:
    system = system_of(router_flags=("--local-prefill-threshold", "0", *CLASSES))
    prompts = random_prompts([LENGTH] * (NUM_BATCH + NUM_INTERACTIVE), vocab_size=256, seed=5)
    asyncio.run(flood(system.stack.url, prompts[:NUM_BATCH], prompts[NUM_BATCH:]))

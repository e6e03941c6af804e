"""The third promise: after any load and any abort every block is free or cached."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
MORE = [((2, 2), "shm"), ((0, 1), "auto")]

NUM_REQUESTS = 60


async def _load(url: str, prompts: list[list[int]]) -> tuple[int, int]:
    """Send every prompt, stop reading a third of the streams at a random moment; (finished, aborted)."""
    source, gate = random.Random(1), asyncio.Semaphore(24)
    counts = {"finished": 0, "aborted": 0}

    async def one(client: httpx.AsyncClient, index: int, prompt: list[int]) -> None:
        body: dict[str, Any] = {"model": "tiny-random", "prompt": prompt, "max_tokens": 40, "ignore_eos": True}
        patience = source.uniform(0.0, 0.15) if index % 3 == 0 else None
        async with gate:
            try:
                async with (
                    asyncio.timeout(patience),
                    client.stream("POST", "/v1/completions", json={**body, "stream": index % 2 == 0}) as reply,
                ):
                    assert reply.status_code == 200
                    async for _ in reply.aiter_bytes():
                        pass
                counts["finished"] += 1
            except TimeoutError:
                counts["aborted"] += 1

    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)) as client:
        await asyncio.gather(*(one(client, index, prompt) for index, prompt in enumerate(prompts)))
    return counts["finished"], counts["aborted"]


@pytest.mark.parametrize(
    ("shape", "transport"),
    [((1, 1), "shm"), ((2, 2), "tcp"), *MORE],
)
def test_nothing_leaks_when_a_third_is_aborted(
    system_of: Any, random_prompts: Any, shape: tuple[int, int], transport: str
) -> None:
    flags = ("--kv-transport", transport)
    system = system_of(*shape, decode_flags=("--num-blocks", "200"), worker_flags=flags)
    source = random.Random(2)
    prompts = random_prompts([source.randrange(1, 900) for _ in range(NUM_REQUESTS)], vocab_size=256, seed=3)
    finished, aborted = asyncio.run(_load(system.stack.url, prompts))
    assert finished + aborted == NUM_REQUESTS and aborted > 4
    system.settle()
    # And it still works.
    assert len(system.generate([prompts[0]], max_tokens=5)[0]) == 5

"""Batch prompts whose decode worker is full leave interactive ones their blocks of prefill memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.stack import StackSettings

from ..paced import PacedStack, answer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200), pytest.mark.slow]

CLASSES = ("--request-class", "name=interactive,priority=5", "name=batch,priority=-5")
NUM_BLOCKS, DECODE_BLOCKS = 64, 48
"""Of the prefill worker, for eight prompts of 8 blocks; of the decode worker, for two or three answers."""
NUM_LOOKS = 50
"""During which the prefill worker would compute all other prompts, if it had blocks for them."""
PROMPT_LEN, NUM_BATCH, NUM_TOKENS, MAX_OWNED = 128, 24, 400, 48


def prompt(number: int) -> list[int]:
    return [(37 * number + 7 * place) % 256 for place in range(PROMPT_LEN)]


async def ask(http: httpx.AsyncClient, number: int, name: str, num_tokens: int) -> list[int]:
    body = {"model": "paced", "prompt": prompt(number), "max_tokens": num_tokens, "temperature": 0}
    reply = await http.post("/v1/completions", json={**body, "return_token_ids": True, "request_class": name})
    assert reply.status_code == 200, reply.text
    tokens: list[int] = reply.json()["choices"][0]["token_ids"]
    return tokens


async def owned(probe: httpx.AsyncClient, url: str) -> int:
    blocks: dict[str, int] = (await probe.get(f"{url}/health")).json()["blocks"]
    return blocks["owned"]


async def flood(url: str, prefill: str) -> None:
    async with (
        httpx.AsyncClient(base_url=url, timeout=150, trust_env=False) as http,
        httpx.AsyncClient(timeout=30, trust_env=False) as probe,
        asyncio.timeout(180),
        asyncio.TaskGroup() as tasks,
    ):
        batch = [tasks.create_task(ask(http, number, "batch", NUM_TOKENS)) for number in range(NUM_BATCH)]
        while await owned(probe, prefill) < MAX_OWNED:
            assert not all(task.done() for task in batch), "the flood never filled the prefill worker"
            await asyncio.sleep(0.01)
        for _ in range(NUM_LOOKS):
            assert await owned(probe, prefill) <= MAX_OWNED, "three quarters of its blocks are theirs"
            await asyncio.sleep(0.02)
        got = await ask(http, 99, "interactive", 1)
        assert got == answer(prompt(99), 1)
        waiting = [task for task in batch if not task.done()]
        assert len(waiting) > NUM_BATCH // 2, "it waited for the flood"
        for task in batch:  # what was to be seen is seen
            task.cancel()


@pytest.fixture
def stack(tmp_path: Path, forge: Any) -> Any:
    flags = {
        "router_flags": ("--local-prefill-threshold", "0", *CLASSES),
        "prefill_flags": ("--num-blocks", str(NUM_BLOCKS)),
        "decode_flags": ("--num-blocks", str(DECODE_BLOCKS)),
    }
    with PacedStack(StackSettings(1, 1, log_dir=tmp_path / "logs", **flags)) as stack:
        yield stack


def test_an_interactive_prompt_is_computed_while_the_decode_worker_is_full(stack: PacedStack) -> None:
    (prefill,) = stack.workers("prefill")
    asyncio.run(flood(stack.router.http_url, prefill.http_url))

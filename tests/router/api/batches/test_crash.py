"""A batch outlives routers that are killed: no line with a result is asked again, whenever the kill comes."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest
from openai.types import Batch

pytestmark = pytest.mark.slow

NUM_LINES, AT_ONCE = 60, 3
PROGRAM = Path(__file__).with_name("crashing_router.py")


@asynccontextmanager
async def router(port: int, store: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, str(PROGRAM), str(port), str(store))
    try:
        async with httpx.AsyncClient(trust_env=False) as http, asyncio.timeout(60):
            while True:
                try:
                    await http.get(f"http://127.0.0.1:{port}/live")
                    break
                except httpx.TransportError:
                    assert process.returncode is None
                    await asyncio.sleep(0.05)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


async def made(sdk: openai.AsyncOpenAI) -> Batch:
    lines = (
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "tiny-random", "prompt": f"line {i}", "max_tokens": 1},
        }
        for i in range(NUM_LINES)
    )
    file = await sdk.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    return await sdk.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


def prompts_asked(store: Path) -> list[str]:
    return store.with_name(f"{store.name}.asked").read_text().splitlines()


async def completed(sdk: openai.AsyncOpenAI, batch: Batch) -> int:
    counts = (await sdk.batches.retrieve(batch.id)).request_counts
    assert counts is not None
    return counts.completed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_router_that_ends_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    store, port, kills, source = tmp_path / "kept.sqlite3", free_port(), 2, random.Random(number)
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as sdk:
        batch: Batch | None = None
        for life in range(kills):
            async with router(port, store) as process:
                batch = batch or await made(sdk)
                async with asyncio.timeout(60):
                    while await completed(sdk, batch) < 15 * (life + 1):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                await asyncio.sleep(source.random() * 0.02)
                process.send_signal(number)
                assert await process.wait() == (-number if number == signal.SIGKILL else 0)
        async with router(port, store), asyncio.timeout(60):
            assert batch is not None
            while (done := await sdk.batches.retrieve(batch.id)).status != "completed":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert done.output_file_id is not None and done.request_counts is not None
            results = [json.loads(line) for line in (await sdk.files.content(done.output_file_id)).text.splitlines()]
    assert [one["custom_id"] for one in results] == [f"r{i}" for i in range(NUM_LINES)]
    assert done.request_counts.completed == NUM_LINES
    asked = prompts_asked(store)
    again = len(asked) - len(set(asked))
    assert len(set(asked)) == NUM_LINES
    assert again <= (kills * AT_ONCE if number == signal.SIGKILL else 0)

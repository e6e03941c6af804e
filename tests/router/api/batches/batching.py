"""How tests make batches with the official client, and wait for their end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import openai
from openai.types import Batch

COMPLETIONS = "/v1/completions"
END = ("completed", "failed", "expired", "cancelled")


def line(name: Any, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    body = body or {"model": "tiny-random", "prompt": "hi", "max_tokens": 3}
    return {"custom_id": name, "method": "POST", "url": path, "body": body}


async def made(sdk: openai.AsyncOpenAI, lines: Sequence[Any], path: Any = COMPLETIONS, **fields: Any) -> Batch:
    texts = (one if isinstance(one, str) else json.dumps(one) for one in lines)
    file = await sdk.files.create(file=("in.jsonl", "\n".join(texts).encode()), purpose="batch")
    return await sdk.batches.create(input_file_id=file.id, endpoint=path, completion_window="24h", **fields)


async def ended(sdk: openai.AsyncOpenAI, batch: Batch) -> Batch:
    """The batch at its end; what it says on the way must add up."""
    async with asyncio.timeout(60):
        while True:
            batch = await sdk.batches.retrieve(batch.id)
            counts = batch.request_counts
            assert counts is not None and counts.completed + counts.failed <= counts.total
            if batch.status in END:
                return batch
            await asyncio.sleep(0.01)


async def lines_in(sdk: openai.AsyncOpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    file = await sdk.files.retrieve(file_id)
    text = (await sdk.files.content(file_id)).text
    assert file.purpose == "batch_output" and file.bytes == len(text.encode()) and text.endswith("\n")
    return [json.loads(one) for one in text.splitlines()]

"""Batches over real processes: a router that is killed, one that ends in order, another that shares the files."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from ..rig import MODEL, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_LINES, AT_ONCE = 40, 4


def client_of(router: Any, closing: ExitStack) -> openai.OpenAI:
    return closing.enter_context(openai.OpenAI(base_url=f"{router.http_url}/v1", api_key="none", max_retries=0))


def made(sdk: openai.OpenAI) -> Batch:
    body = {"model": MODEL, "prompt": "The quick", "max_tokens": 150, "temperature": 0, "ignore_eos": True}
    lines = (
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body | {"seed": i}}
        for i in range(NUM_LINES)
    )
    file = sdk.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    return sdk.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


def completed(sdk: openai.OpenAI, batch: Batch) -> int:
    counts = sdk.batches.retrieve(batch.id).request_counts
    assert counts is not None
    return counts.completed


def lines_of(router: Any) -> int:
    """Lines that this life of a router completed."""
    text = httpx.get(f"{router.http_url}/metrics", trust_env=False, timeout=30).text
    samples = (line for line in text.splitlines() if line.startswith("diptych_batch_lines_total"))
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in samples if 'result="completed"' in line))


def check_whole(sdk: openai.OpenAI, batch: Batch) -> None:
    done = sdk.batches.retrieve(batch.id)
    assert done.status == "completed" and done.error_file_id is None and done.output_file_id is not None
    results = [json.loads(line) for line in sdk.files.content(done.output_file_id).text.splitlines()]
    assert [one["custom_id"] for one in results] == [f"r{i}" for i in range(NUM_LINES)]
    assert {one["response"]["body"]["usage"]["completion_tokens"] for one in results} == {150}
    assert done.usage is not None and done.usage.output_tokens == 150 * NUM_LINES


def test_a_killed_router_does_no_finished_line_again(system_of: Any, closing: ExitStack, tmp_path: Path) -> None:
    flags = ("--response-store", str(tmp_path / "kept.sqlite3"), "--batch-concurrency", str(AT_ONCE))
    stack = system_of(routers=2, router_flags=flags).stack
    first, second = (client_of(router, closing) for router in stack.routers)
    batch = made(first)
    wait_until(lambda: completed(second, batch) >= 5, "some lines are done")
    answer = first.completions.create(model=MODEL, prompt="hi", max_tokens=3, temperature=0)
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    assert completed(first, batch) < NUM_LINES, "who asks does not wait for a batch"
    stack.routers[0].kill()
    done = completed(second, batch)
    assert 5 <= done < NUM_LINES
    wait_until(lambda: second.batches.retrieve(batch.id).status == "completed", "the second router took it up")
    check_whole(second, batch)
    assert lines_of(stack.routers[1]) == NUM_LINES - done
    stack.restart(stack.routers[0])
    stack.wait_ready(time.monotonic() + 60)


def test_a_router_that_ends_in_order_goes_on_at_its_next_start(
    system_of: Any, closing: ExitStack, tmp_path: Path
) -> None:
    flags = ("--response-store", str(tmp_path / "kept.sqlite3"), "--batch-concurrency", str(AT_ONCE))
    stack = system_of(router_flags=flags).stack
    sdk = client_of(stack.router, closing)
    batch = made(sdk)
    wait_until(lambda: completed(sdk, batch) >= 5, "some lines are done")
    stack.router.terminate()
    wait_until(lambda: not stack.router.alive, "it ended")
    stack.restart(stack.router)
    stack.wait_ready(time.monotonic() + 60)
    wait_until(lambda: sdk.batches.retrieve(batch.id).status == "completed", "it went on")
    check_whole(sdk, batch)
    assert 0 < lines_of(stack.router) <= NUM_LINES - 5

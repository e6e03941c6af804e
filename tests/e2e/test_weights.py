"""Decode workers with other weights, as in a rolling change of the model: no answer is made by two of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.stack import Stack, StackProcess

from ..rig import MODEL, PROMPT, complete, samples, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

QUEUE_S = 2.0
COUNT = 3500


@pytest.fixture
def unequal(system_of: Any) -> Iterator[Stack]:
    """Two decode workers, of which the second keeps its weights in 8 bits."""
    stack: Stack = system_of(0, 2, router_flags=("--queue-timeout-s", str(QUEUE_S))).stack
    other = stack.workers("decode")[1]
    command, other.command = other.command, [*other.command, "--quantization", "int8"]
    other.kill()
    stack.restart(other)
    wait_until_ready(stack, 2)
    yield stack
    other.kill()
    other.command = command
    for worker in stack.workers("decode"):
        if not worker.alive:
            stack.restart(worker)
    wait_until_ready(stack, 2)


def wait_until_ready(stack: Stack, count: int) -> None:
    def ready() -> int:
        workers = httpx.get(f"{stack.url}/load", timeout=30, trust_env=False).json()["workers"]
        return [worker["state"] for worker in workers].count("ready")

    wait_until(lambda: ready() == count, f"{count} workers are ready")


def test_a_stream_whose_worker_dies_does_not_go_on_with_other_weights(unequal: Stack) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": COUNT, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{unequal.url}/v1/completions", json=body, timeout=60, trust_env=False) as reply:
        lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: "))
        assert "choices" in json.loads(next(lines))
        running(unequal).kill()
        began, last = time.monotonic(), ""
        for line in lines:
            last = line if line != "[DONE]" else last
    error = json.loads(last)["error"]
    assert "no ready decode worker has the weights with which its answer began" in error["message"]
    assert time.monotonic() - began >= QUEUE_S  # for one that comes back
    with httpx.Client(base_url=unequal.url, timeout=60, trust_env=False) as client:
        assert complete(client, prompt=PROMPT, max_tokens=5)["usage"]["completion_tokens"] == 5


def running(stack: Stack) -> StackProcess:
    """The decode worker that runs the one request."""
    found: list[StackProcess] = []

    def look() -> bool:
        found[:] = [one for one in stack.workers("decode") if sum(samples(one, "vllm:num_requests_running")) >= 1]
        return bool(found)

    wait_until(look, "a worker runs it")
    return found[0]

"""What tests of the HTTP API ask for, and how they wait for what follows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx

from benchmarks.stack import Stack

MODEL = "tiny-random"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4  # one token a byte
PATIENCE_S = 60.0
PROBE_TIMEOUT_S = 30.0


def wait_until(true: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline, f"not within {patience_s:g} s: {what}"
        time.sleep(0.02)


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    reply = client.post("/v1/completions", json={"model": MODEL, "temperature": 0, "ignore_eos": True, **body})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def owned(stack: Stack) -> dict[str, int]:
    """Blocks that requests hold, by worker."""
    urls = {worker.name: f"{worker.http_url}/health" for worker in stack.workers()}
    replies = {name: httpx.get(url, trust_env=False, timeout=PROBE_TIMEOUT_S) for name, url in urls.items()}
    return {name: reply.json()["blocks"]["owned"] for name, reply in replies.items()}

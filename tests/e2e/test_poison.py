"""A request that kills every worker that computes it ends, with an error that names the cause. Others go on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.stack import Stack

from ..rig import MODEL, PROBE_TIMEOUT_S, System, make_faulty, make_stack, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_WORKERS, MAX_RETRIES = 4, 2
NUM_TOKENS = 300
PATIENCE_S = 120.0
POISON = [13, 13, 13, 66, 66, 66]


@pytest.fixture(params=("poison", "xid"), ids=("killed", "device fails"))
def mortal(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[System]:
    """Decode workers only, which die of the poison."""
    stack = make_stack(tmp_path, 0, NUM_WORKERS, router_flags=("--max-retries", str(MAX_RETRIES)))
    for worker in stack.workers():
        make_faulty(worker, **{request.param: ",".join(map(str, POISON))})
    with stack:
        yield System(stack)


def load(stack: Stack) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{stack.url}/load", timeout=PROBE_TIMEOUT_S, trust_env=False).json()
    return answer


def test_a_request_that_kills_its_workers_ends_alone(mortal: System, random_prompts: Any) -> None:
    stack = mortal.stack
    wait_until(lambda: {worker["state"] for worker in load(stack)["workers"]} == {"ready"}, "all ready", PATIENCE_S)
    prompts = random_prompts((40, 100, 160) * 4, vocab_size=256, seed=41)
    expected = mortal.generate(prompts, max_tokens=NUM_TOKENS)
    body = {"model": MODEL, "prompt": POISON * 6, "max_tokens": 9}
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(mortal.generate, prompts, max_tokens=NUM_TOKENS, cache_salt="beside")
        wait_until(lambda: load(stack)["stages"]["decode"] >= NUM_WORKERS, "the others run", PATIENCE_S)
        reply = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False)
        assert others.result(PATIENCE_S) == expected
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "request_ends_workers"), reply.text
    wait_until(lambda: sum(not one.alive for one in stack.workers()) == MAX_RETRIES + 1, "they end", PATIENCE_S)
    dead = [worker for worker in stack.workers() if not worker.alive]
    (line,) = [line for line in stack.router.log.read_text().splitlines() if " ended with status 400: " in line]
    assert all(worker.name in line for worker in dead) and " its last 3 workers died: " in line
    (ended,) = [line for line in stack.router.log.read_text().splitlines() if "error=FatalRequest" in line]
    assert re.search(r" id=(\S+)", ended)[1] in line  # type: ignore[index]
    if "xid=" in " ".join(dead[0].command):
        assert all("cpu failed: CUDA error: unspecified launch" in worker.log.read_text() for worker in dead)
    mortal.settle()

"""Two routers before the same workers know what these cache, whichever of them sent it there."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from ..rig import PROBE_TIMEOUT_S, READY_S, samples

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_CONVERSATIONS, ANSWER_TOKENS, NEXT_TOKENS = 6, 40, 5
BLOCK_SIZE = 16


def ask(router: Any, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = httpx.post(f"{router.http_url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def known_blocks(router: Any) -> dict[str, float]:
    """By worker, how many cached blocks a router knows of."""
    page = httpx.get(f"{router.http_url}/metrics", timeout=PROBE_TIMEOUT_S, trust_env=False).text
    lines = [line for line in page.splitlines() if line.startswith("diptych_worker_known_blocks{")]
    return {line.split('worker="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def agree(system: Any) -> None:
    """Wait until each router knows of as many blocks as each worker has cached."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        cached = {
            worker.name: sum(samples(worker, "diptych_kv_blocks", 'state="cached"'))
            for worker in system.stack.workers()
        }
        known = [known_blocks(router) for router in system.stack.routers]
        if any(cached.values()) and all(found == cached for found in known):
            return
        time.sleep(0.05)
    pytest.fail(f"workers have cached {cached}, routers know of {known}")


def test_a_next_turn_that_comes_to_another_router_is_not_computed_again(
    system_of: Any, tiny_oracle: Any, random_prompts: Any
) -> None:
    system = system_of(2, 2, routers=2, router_flags=("--local-prefill-threshold", "64"))
    first, second = system.stack.routers
    turns = []
    for prompt in random_prompts((100,) * NUM_CONVERSATIONS, vocab_size=256, seed=11):
        answer = ask(first, prompt, ANSWER_TOKENS)["choices"][0]["token_ids"]
        turns.append(prompt + answer + [7] * NEXT_TOKENS)
    system.settle()
    agree(system)
    replies = [ask(second, turn, 4) for turn in turns]
    for turn, reply in zip(turns, replies, strict=True):
        assert reply["choices"][0]["token_ids"] == tiny_oracle.greedy(turn, 4)
    # The KV of an answer's last token was never computed. Prefill workers hold no answer at all.
    cached = (100 + ANSWER_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
    found = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
    assert found.count(cached) >= NUM_CONVERSATIONS // 2, f"{found}: only predicted times may send some elsewhere"


def test_a_router_that_starts_later_learns_what_is_cached(system_of: Any, random_prompts: Any) -> None:
    system = system_of(2, 2, routers=2, router_flags=("--local-prefill-threshold", "64"))
    first, second = system.stack.routers
    for prompt in random_prompts((80, 90), vocab_size=256, seed=12):
        ask(first, prompt, 8)
    second.kill()
    system.stack.restart(second)
    system.stack.wait_ready(time.monotonic() + READY_S)
    system.wait_for_workers()
    system.settle()
    agree(system)

"""Workers that die or freeze while they serve: the client's text is that of the unfailed run, and nothing leaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from diptych.benchmarks.stack import StackProcess

from .asking import wait_until

pytestmark = pytest.mark.e2e

ALL_REMOTE = ("--local-prefill-threshold", "0")
SLOW_PREFILL = ("--max-num-batched-tokens", "32")
NUM_TOKENS = 150


def run_with(
    system: Any, prompts: list[list[int]], victim: StackProcess, disturb: Callable[[], None], **params: Any
) -> list[list[int]]:
    """Generate all prompts at once, and disturb the system once `victim` has some of them; they must move then."""
    result: list[list[list[int]]] = []
    before = num_moves(system)
    thread = threading.Thread(target=lambda: result.append(system.generate(prompts, max_tokens=NUM_TOKENS, **params)))
    thread.start()
    wait_until(lambda: is_busy(system, victim), f"{victim.name} is busy")
    disturb()
    thread.join(120)
    assert result, "requests hang"
    assert num_moves(system) > before, f"nothing was on {victim.name}"
    return result[0]


def is_busy(system: Any, worker: StackProcess) -> bool:
    """Whether it computes a prompt, or its pool has begun to generate: then much of that is still to come."""
    if worker.role == "decode":
        return bool(system.metric("vllm:num_requests_running", "decode") >= len(system.stack.workers("decode")))
    health = httpx.get(f"{worker.http_url}/health", timeout=10, trust_env=False)
    return bool(health.json()["blocks"]["owned"])


def num_moves(system: Any) -> float:
    """Requests that moved off a worker, by what the router counts."""
    page = httpx.get(f"{system.stack.url}/metrics", timeout=10, trust_env=False).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith("diptych_retries_total"))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "sampled"])
def test_a_killed_worker_costs_no_token(
    system_of: Any, random_prompts: Any, role: str, params: dict[str, Any], transport: str
) -> None:
    system = system_of(
        2, 2, router_flags=ALL_REMOTE, worker_flags=("--kv-transport", transport), prefill_flags=SLOW_PREFILL
    )
    prompts = random_prompts((30, 200, 700, 1500) * 4, vocab_size=256, seed=1)
    expected = system.generate(prompts, max_tokens=NUM_TOKENS, **params)
    victim = system.stack.workers(role)[0]
    salt = f"{role} {transport} {params}"  # nothing is cached, so that there is something to prefill
    got = run_with(system, random_order(prompts), victim, victim.kill, cache_salt=salt, **params)
    system.stack.restart(victim)
    assert got == random_order(expected)
    system.stack.wait_ready(time.monotonic() + 60)


def test_a_frozen_decode_worker_is_left_and_comes_back(system_of: Any, random_prompts: Any) -> None:
    system = system_of(2, 2, router_flags=ALL_REMOTE)
    prompts = random_prompts((40, 300, 900) * 4, vocab_size=256, seed=2)
    expected = system.generate(prompts, max_tokens=NUM_TOKENS)
    victim = system.stack.workers("decode")[1]
    got = run_with(system, prompts, victim, victim.pause)
    victim.resume()
    assert got == expected
    assert system.generate(prompts, max_tokens=NUM_TOKENS) == expected


def test_without_prefill_workers_decode_serves_alone_and_goes_back(system_of: Any, random_prompts: Any) -> None:
    system = system_of(router_flags=ALL_REMOTE)
    prompts = random_prompts((300, 500), vocab_size=256, seed=3)
    expected = system.generate(prompts, max_tokens=20)
    (prefill,) = system.stack.workers("prefill")
    prefill.kill()
    fresh = random_prompts((310, 510), vocab_size=256, seed=4)
    alone = system.generate(fresh, max_tokens=20)
    system.stack.restart(prefill)
    back = time.monotonic() + 60
    while system.requests_of(prefill) == 0:
        assert time.monotonic() < back, "the restarted prefill worker gets nothing"
        system.generate(random_prompts((400,), vocab_size=256, seed=int(time.monotonic() * 1000)), max_tokens=2)
    assert system.generate(prompts + fresh, max_tokens=20) == expected + alone


def random_order(items: list[Any]) -> list[Any]:
    """A fixed shuffle, so that the second run does not repeat the first one's order of cache hits."""
    return items[::2] + items[1::2]

"""What every way for KV between workers is asked alike: answers with a small cache, deaths, workers that leave."""

from __future__ import annotations

import time
from typing import Any

from .test_failures import run_with
from .test_handover import LONG, handovers, leave, under_load, wait_for_streams
from .test_same_answer import Case

MANY_TOKENS = 400
SMALL_STEPS = ("--max-num-batched-tokens", "32")
SMALL_BLOCKS = ("--block-size", "16")
FEW_BLOCKS = ("--num-blocks", "48", "--kv-memory-gib", "0")


def a_small_cache_preempts(system: Any, oracle: Any, prompts: list[list[int]], transport: str) -> None:
    """Workers of `system` have `SMALL_BLOCKS`, decode workers `FEW_BLOCKS`."""
    case = Case(prompts, [oracle.greedy(prompt, 120) for prompt in prompts])
    case.check(system.generate(prompts, max_tokens=120, at_once=12))
    assert system.metric("vllm:num_preemptions", "decode") and system.transfers(transport)


def a_killed_worker_costs_no_token(system: Any, prompts: list[list[int]], role: str, transport: str) -> None:
    """`system` has two workers of each role, with `SMALL_STEPS` for prompts."""
    expected = system.generate(prompts, max_tokens=MANY_TOKENS)
    victim = system.stack.workers(role)[0]
    assert run_with(system, prompts, victim, victim.kill, cache_salt=role) == expected
    system.stack.restart(victim)
    system.stack.wait_ready(time.monotonic() + 60)
    before = system.transfers(transport)
    assert system.generate(prompts, max_tokens=MANY_TOKENS, cache_salt="again") == expected
    assert system.transfers(transport) > before


def a_frozen_prefill_worker_is_left(system: Any, prompts: list[list[int]], frozen_s: float = 0.0) -> None:
    """And comes back, after `frozen_s` more than its prompts need elsewhere. Workers as above."""
    expected = system.generate(prompts, max_tokens=MANY_TOKENS)
    victim = system.stack.workers("prefill")[1]
    try:
        got = run_with(system, prompts, victim, victim.pause, cache_salt="frozen")
        time.sleep(frozen_s)
    finally:
        victim.resume()
    assert got == expected
    system.wait_for_workers()
    assert system.generate(prompts, max_tokens=MANY_TOKENS, cache_salt="awake") == expected


def a_leaving_worker_hands_over(system: Any, prompts: list[list[int]], logged: str) -> None:
    """To the other of two decode workers, whose log says so with "KV from NAME" and what is `logged`."""
    victim, other = system.stack.workers("decode")
    with under_load(system, prompts, LONG) as running:
        running.wait_for_streams(4)
        leave(victim)
    assert handovers(system) > 0
    system.stack.restart(victim)
    system.stack.wait_ready(time.monotonic() + 60)
    assert f"KV from {victim.name} {logged}" in other.log.read_text()
    wait_for_streams(system, 0)

"""Workers that die or freeze while they serve: the client's text is that of the unfailed run, and nothing leaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from benchmarks.stack import StackProcess

from ..rig import PROBE_TIMEOUT_S, wait_until

pytestmark = pytest.mark.e2e

ALL_REMOTE = ("--local-prefill-threshold", "0")
SLOW_PREFILL = ("--max-num-batched-tokens", "32")
PATIENT = ("--queue-timeout-s", "120")
HASTY_DRAIN = ("--drain-timeout-s", "0.1")
NUM_TOKENS = 400
"""More than is generated while a test looks and strikes."""
AGAIN_TOKENS = 40
"""What shows that a worker is back."""
PATIENCE_S = 240.0
ON_THE_WAY_S = 0.1
POLL_S = 0.01
ATTEMPTS = 10


def run_with(
    system: Any,
    prompts: list[list[int]],
    victim: StackProcess,
    disturb: Callable[[], None],
    *,
    cache_salt: str,
    **params: Any,
) -> list[list[int]]:
    """Generate all prompts at once, and disturb the system while `victim` has some of them; they must move then.

    The victim is frozen when `disturb` is called. Prompts that are done before it is caught at work are sent again.
    """
    wait_until(lambda: all(state == "ready" for state in states(system)), "all workers are used")
    before = num_moves(system)
    for attempt in range(ATTEMPTS):
        result: list[list[list[int]]] = []
        salt = f"{cache_salt} {attempt}"  # nothing is cached, so that there is something to compute
        body = {"max_tokens": NUM_TOKENS, "cache_salt": salt, **params}
        thread = threading.Thread(target=lambda body=body, to=result: to.append(system.generate(prompts, **body)))
        thread.start()
        caught = caught_at_work(system, victim, thread)
        if caught:
            disturb()
        thread.join(PATIENCE_S)
        assert result, "requests hang"
        if caught:
            assert num_moves(system) > before, f"nothing was on {victim.name}"
            return result[0]
    raise AssertionError(f"{victim.name} was never caught at work")


def caught_at_work(system: Any, victim: StackProcess, thread: threading.Thread) -> bool:
    """Freeze `victim` while it has requests that it cannot have ended: the router still counts them on it.

    False, with the victim awake, once `thread` has all its answers.
    """
    while thread.is_alive():
        if is_busy(system, victim):
            victim.pause()
            time.sleep(ON_THE_WAY_S)  # what it had sent before is at the router now
            if has_requests(system, victim):
                return True
            victim.resume()
        time.sleep(POLL_S)
    return False


def is_busy(system: Any, worker: StackProcess) -> bool:
    """Whether it computes a prompt, or its pool has begun to generate: then much of that is still to come."""
    if worker.role == "decode":
        return bool(system.metric("vllm:num_requests_running", "decode") >= len(system.stack.workers("decode")))
    health = httpx.get(f"{worker.http_url}/health", timeout=PROBE_TIMEOUT_S, trust_env=False)
    return bool(health.json()["blocks"]["owned"])


def has_requests(system: Any, worker: StackProcess) -> bool:
    """Whether the router counts requests on it."""
    load = httpx.get(f"{system.stack.url}/load", timeout=PROBE_TIMEOUT_S, trust_env=False).json()
    (requests,) = (one["num_booked_requests"] for one in load["workers"] if one["worker_id"] == worker.name)
    return bool(requests)


def states(system: Any) -> list[str]:
    """Of all workers, as the router sees them: it is ready itself when some are."""
    load = httpx.get(f"{system.stack.url}/load", timeout=PROBE_TIMEOUT_S, trust_env=False).json()
    return [worker["state"] for worker in load["workers"]]


def num_moves(system: Any) -> float:
    """Requests that moved off a worker, by what the router counts."""
    page = httpx.get(f"{system.stack.url}/metrics", timeout=PROBE_TIMEOUT_S, trust_env=False).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith("diptych_retries_total"))


SAMPLED = {"temperature": 1.0, "seed": 5}
PAIRS = [("prefill", "shm", SAMPLED), ("prefill", "tcp", {}), ("decode", "shm", {}), ("decode", "tcp", SAMPLED)]


@pytest.mark.slow_except("decode-tcp-params3")
@pytest.mark.parametrize(("role", "transport", "params"), PAIRS)
def test_a_killed_worker_costs_no_token(
    system_of: Any, random_prompts: Any, role: str, params: dict[str, Any], transport: str
) -> None:
    system = system_of(
        2, 2, router_flags=ALL_REMOTE, worker_flags=("--kv-transport", transport), prefill_flags=SLOW_PREFILL
    )
    copies = 2 if role == "prefill" else 1  # prompts are computed faster than answers
    prompts = random_prompts((30, 200, 700, 1500) * copies, vocab_size=256, seed=1)
    expected = system.generate(prompts, max_tokens=NUM_TOKENS, **params)
    victim = system.stack.workers(role)[0]
    salt = f"{role} {transport} {params}"
    got = run_with(system, random_order(prompts), victim, victim.kill, cache_salt=salt, **params)
    system.stack.restart(victim)
    assert got == random_order(expected)
    system.stack.wait_ready(time.monotonic() + 60)


@pytest.mark.slow
def test_a_frozen_prefill_worker_is_left_and_comes_back(system_of: Any, random_prompts: Any) -> None:
    system = system_of(
        2, 2, router_flags=ALL_REMOTE, worker_flags=("--kv-transport", "tcp"), prefill_flags=SLOW_PREFILL
    )
    prompts = random_prompts((30, 700, 1500) * 2, vocab_size=256, seed=6)
    expected = system.generate(prompts, max_tokens=NUM_TOKENS)
    victim = system.stack.workers("prefill")[1]
    try:
        got = run_with(system, prompts, victim, victim.pause, cache_salt="frozen")
    finally:
        victim.resume()
    assert got == expected
    system.settle()  # it dropped what was given away while it slept
    again = system.generate(prompts, max_tokens=AGAIN_TOKENS, cache_salt="awake")
    assert again == [tokens[:AGAIN_TOKENS] for tokens in expected]


@pytest.mark.slow
def test_a_frozen_decode_worker_is_left_and_comes_back(system_of: Any, random_prompts: Any) -> None:
    system = system_of(2, 2, router_flags=ALL_REMOTE)
    prompts = random_prompts((40, 300, 900) * 2, vocab_size=256, seed=2)
    expected = system.generate(prompts, max_tokens=NUM_TOKENS)
    victim = system.stack.workers("decode")[1]
    try:
        got = run_with(system, prompts, victim, victim.pause, cache_salt="frozen")
    finally:
        victim.resume()
    assert got == expected
    again = system.generate(prompts, max_tokens=AGAIN_TOKENS)
    assert again == [tokens[:AGAIN_TOKENS] for tokens in expected]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_streams_wait_for_a_decode_worker_and_go_on(system_of: Any, random_prompts: Any, end: str) -> None:
    """The only one dies, or drains for longer than it may: what runs waits, and so does what comes meanwhile."""
    system = system_of(router_flags=ALL_REMOTE + PATIENT, worker_flags=HASTY_DRAIN)
    prompts = random_prompts((30, 200, 700) * 2, vocab_size=256, seed=7)
    late = random_prompts((50, 400), vocab_size=256, seed=8)
    expected = system.generate(prompts + late, max_tokens=NUM_TOKENS)
    (victim,) = system.stack.workers("decode")

    def lose_it() -> None:
        getattr(victim, end)()
        victim.wait(time.monotonic() + 60)
        wait_until(lambda: num_queued(system) > 0, "streams wait")
        coming.start()
        wait_until(lambda: num_queued(system) > len(late), "new requests wait, too")
        system.stack.restart(victim)

    came: list[list[list[int]]] = []
    coming = threading.Thread(target=lambda: came.append(system.generate(late, max_tokens=NUM_TOKENS)))
    got = run_with(system, prompts, victim, lose_it, cache_salt=end)
    coming.join(PATIENCE_S)
    assert (got, came) == (expected[: len(prompts)], [expected[len(prompts) :]])


def num_queued(system: Any) -> int:
    stages = httpx.get(f"{system.stack.url}/load", timeout=PROBE_TIMEOUT_S, trust_env=False).json()["stages"]
    return int(stages["queue"])


@pytest.mark.slow
def test_without_prefill_workers_decode_serves_alone_and_goes_back(system_of: Any, random_prompts: Any) -> None:
    system = system_of(router_flags=ALL_REMOTE + PATIENT, worker_flags=HASTY_DRAIN)
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

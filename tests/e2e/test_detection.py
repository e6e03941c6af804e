"""Workers that look alive and are not: one whose step never ends, one that sleeps and wakes up again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.engine.worker.step_times import LONGEST_S

from ..rig import faulty, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FLAGS = ("--local-prefill-threshold", "0")
NUM_TOKENS = 200
SHORT_S = 5.0
"""The longest step of which nothing is known, in seconds. The slow step of the test takes about twice as long."""


class Run:
    """All prompts at once, in the background, again and again until the answers are asked for."""

    def __init__(self, system: Any, prompts: list[list[int]]) -> None:
        self.results: list[list[list[int]]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(system, prompts))
        self._thread.start()

    def _run(self, system: Any, prompts: list[list[int]]) -> None:
        while not self._stopping.is_set():
            self.results.append(system.generate(prompts, max_tokens=NUM_TOKENS))

    def answered_with(self, expected: list[list[int]]) -> bool:
        """Whether every round was; the one that runs is waited for."""
        self._stopping.set()
        self._thread.join(200)
        assert not self._thread.is_alive(), "requests hang"
        return bool(self.results) and all(result == expected for result in self.results)


def workers(system: Any) -> dict[str, dict[str, Any]]:
    """What the router says of each worker, by name."""
    listed = httpx.get(f"{system.stack.url}/load", trust_env=False, timeout=30).json()["workers"]
    return {worker["worker_id"]: worker for worker in listed}


def state_of(system: Any, worker: Any) -> str:
    """Nothing for a worker that is away: the router does not know then who it was."""
    return str(workers(system).get(worker.name, {}).get("state", ""))


def own_state(worker: Any) -> tuple[int, str]:
    """What the worker says of itself, and the status that a probe sees."""
    reply = httpx.get(f"{worker.http_url}/health", trust_env=False, timeout=30)
    return reply.status_code, reply.json()["state"]


def running_on(system: Any, worker: Any) -> bool:
    return bool(workers(system).get(worker.name, {}).get("num_booked_requests"))


@pytest.fixture
def hanging(system_of: Any, tmp_path: Path) -> Iterator[tuple[Any, Any, Path]]:
    """A system with two decode workers, the second of which hangs from the moment that the file is made."""
    system, flag = system_of(1, 2, router_flags=FLAGS), tmp_path / "hang"
    victim = system.stack.workers("decode")[1]
    with faulty(system.stack, victim, hang=flag):
        wait_until(lambda: state_of(system, victim) == "ready", "the worker is not ready")
        yield system, victim, flag


@pytest.mark.own_engine  # as are the faults
@pytest.mark.timeout(400)
def test_a_worker_whose_step_never_ends_loses_its_streams(hanging: tuple[Any, Any, Path], random_prompts: Any) -> None:
    system, victim, flag = hanging
    prompts = random_prompts((30, 200, 700) * 2, vocab_size=256, seed=11)
    expected = system.generate(prompts, max_tokens=NUM_TOKENS)
    run = Run(system, prompts)
    wait_until(lambda: running_on(system, victim), "the worker got nothing")
    flag.touch()
    # A worker that has computed no step yet waits for its first one for LONGEST_S.
    wait_until(lambda: state_of(system, victim) == "dead", "the router did not notice", LONGEST_S + 60)
    wait_until(lambda: own_state(victim) == (503, "stuck"), "the worker itself did not notice")
    assert run.answered_with(expected)
    assert system.generate(prompts, max_tokens=NUM_TOKENS) == expected


def test_a_worker_that_wakes_up_drops_what_was_given_away(system_of: Any, random_prompts: Any) -> None:
    system = system_of(1, 2, router_flags=FLAGS)
    prompts = random_prompts((40, 300, 900) * 2, vocab_size=256, seed=12)
    expected = system.generate(prompts, max_tokens=NUM_TOKENS)
    victim = system.stack.workers("decode")[0]
    run = Run(system, prompts)
    wait_until(lambda: running_on(system, victim), "the worker got nothing")
    victim.pause()
    wait_until(lambda: state_of(system, victim) != "ready", "the router did not notice")
    assert run.answered_with(expected)
    victim.resume()
    system.settle()  # it owns nothing: what it had was taken away while it slept
    wait_until(lambda: state_of(system, victim) == "ready", "the worker is not used again")
    wait_until(lambda: system.metric("vllm:num_requests_running", "decode") == 0, "something runs that nobody wants")
    assert system.generate(prompts, max_tokens=NUM_TOKENS) == expected


@pytest.mark.own_engine
def test_a_first_step_beyond_the_longest_is_waited_for(system_of: Any, random_prompts: Any, tmp_path: Path) -> None:
    """A large model on a slow machine. How slow it is has shown while it warmed up. A minute is shortened here."""
    system, flag = system_of(1, 1, router_flags=FLAGS), tmp_path / "slow"
    (prompt,) = random_prompts((320,), vocab_size=256, seed=13)
    expected = system.generate([prompt], max_tokens=10)
    victim = system.stack.workers("prefill")[0]
    flag.write_text("0.03 a token")
    with faulty(system.stack, victim, hang=flag, longest_step=SHORT_S):
        wait_until(lambda: state_of(system, victim) == "ready", "the worker is not ready")
        began = time.monotonic()
        assert system.generate([prompt], max_tokens=10, cache_salt="slow") == expected  # none of it can be pulled
        assert time.monotonic() - began > 1.5 * SHORT_S
        assert "stuck" not in system.stack.router.log.read_text()
        assert ": retrying:" not in system.stack.router.log.read_text()

"""Workers that are told to end while they serve: their streams go on elsewhere, and they exit with status 0."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from benchmarks.stack import StackProcess

from ..rig import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

PATIENCE_S = 120.0
LENGTHS = (30, 100, 200, 350)
NUM_TOKENS = 250
LONG = 1000
"""So long that all streams run together, however unevenly they begin."""
PARAMS: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.5})


def ask(system: Any, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """All prompts at once, greedy and with seeded noise."""
    with ThreadPoolExecutor(len(PARAMS)) as pool:
        halves = pool.map(lambda params: system.generate(prompts, max_tokens=num_tokens, **params), PARAMS)
        return [tokens for half in halves for tokens in half]


@dataclass
class Load:
    """Asks the same again and again, in rounds of streams that begin together."""

    system: Any
    num_rounds: int = 0

    def wait_for_streams(self, count: int) -> None:
        """Until that many run, of a round that has only just begun: most of what they will say is still to come."""
        before = self.num_rounds
        wait_until(lambda: self.num_rounds > before, "another round begins", PATIENCE_S)
        wait_for_streams(self.system, count)


@contextmanager
def under_load(system: Any, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> Iterator[Load]:
    """Ask again and again meanwhile; every answer must be that of an undisturbed run."""
    expected, stop, wrong = ask(system, prompts, num_tokens), threading.Event(), list[Any]()
    running = Load(system)

    def load() -> None:
        try:
            while not stop.is_set() and not wrong:
                running.num_rounds += 1
                got = ask(system, prompts, num_tokens)
                wrong.extend(pair for pair in zip(got, expected, strict=True) if pair[0] != pair[1])
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield running
    finally:
        stop.set()
        thread.join(PATIENCE_S)
    assert not thread.is_alive(), "requests hang"
    assert not wrong, wrong[0]


def wait_for_streams(system: Any, count: int) -> None:
    running = "vllm:num_requests_running"
    wait_until(lambda: system.metric(running, "decode") >= count, f"{count} streams", PATIENCE_S)


def flags(transport: str) -> dict[str, tuple[str, ...]]:
    return {
        "router_flags": ("--local-prefill-threshold", "0", "--drain-timeout-s", "60"),
        "worker_flags": ("--drain-timeout-s", "60", "--kv-transport", transport),
    }


def leave(worker: StackProcess) -> None:
    """SIGTERM, and the end that must follow."""
    worker.terminate()
    worker.wait(time.monotonic() + PATIENCE_S)
    assert (worker.returncode, worker.forced) == (0, False), worker.log_tail()


def come_back(system: Any, worker: StackProcess) -> None:
    """Started again on its ports, and known to the router."""
    system.stack.restart(worker)
    wait_until(lambda: is_used(system, worker), f"{worker.name} is ready", PATIENCE_S)


def is_used(system: Any, worker: StackProcess) -> bool:
    labels = (f'worker="{worker.name}"', 'state="ready"')
    return any(all(label in line for label in labels) for line in router_lines(system, "diptych_worker_state"))


def router_lines(system: Any, name: str) -> list[str]:
    page = httpx.get(f"{system.stack.url}/metrics", timeout=30.0, trust_env=False).text
    return [line for line in page.splitlines() if line.startswith(name)]


def handovers(system: Any, outcome: str = "done") -> float:
    lines = router_lines(system, "diptych_handovers_total")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if f'outcome="{outcome}"' in line)


@pytest.mark.parametrize("transport", [pytest.param("shm", marks=pytest.mark.slow), "tcp"])
def test_a_decode_worker_that_ends_hands_its_streams_over(system_of: Any, random_prompts: Any, transport: str) -> None:
    system = system_of(2, 2, **flags(transport))
    victim = system.stack.workers("decode")[0]
    with under_load(system, random_prompts(LENGTHS, vocab_size=256, seed=1)) as load:
        load.wait_for_streams(6)
        leave(victim)
    assert handovers(system) > 0
    come_back(system, victim)


@pytest.mark.slow
def test_a_rolling_restart_fails_no_request_and_changes_no_token(system_of: Any, random_prompts: Any) -> None:
    system = system_of(2, 2, **flags("tcp"))
    done = handovers(system)
    with under_load(system, random_prompts(LENGTHS, vocab_size=256, seed=2)) as load:
        for worker in system.stack.workers():
            load.wait_for_streams(6)
            leave(worker)
            come_back(system, worker)
    assert handovers(system) > done


@pytest.mark.slow
def test_the_last_decode_worker_finishes_its_streams(system_of: Any, random_prompts: Any) -> None:
    system = system_of(1, 1, **flags("tcp"))
    prompts = random_prompts((40, 300), vocab_size=256, seed=3)
    expected = ask(system, prompts, LONG)
    (worker,) = system.stack.workers("decode")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, system, prompts, LONG)
        wait_for_streams(system, 4)
        leave(worker)
        assert answer.result(PATIENCE_S) == expected
    come_back(system, worker)

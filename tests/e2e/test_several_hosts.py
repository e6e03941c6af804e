"""Workers whose ranks are on two hosts in a whole service: the same answers, through deaths, drains and restarts."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ..common.engine.ranks.rank_hosts import RankHostProcess, free_port
from ..rig import System, make_stack, samples, wait_until
from .test_handover import come_back, handovers, wait_for_streams
from .test_tensor_parallel import ALL_REMOTE, GONE_S, LENGTHS, LONG, NUM_TOKENS, PATIENCE_S, is_running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.slow]


def two_hosts(port: int) -> tuple[str, ...]:
    return ("--tensor-parallel-size", "2", "--rank-hosts", "2", "--rank-port", str(port))


@contextmanager
def spread_service(folder: Path, role: str, decode: int = 1) -> Iterator[tuple[System, RankHostProcess]]:
    """The first worker of a role has its second rank on another host."""
    port = free_port()
    host = RankHostProcess(folder, port)
    host.start()
    stack = make_stack(folder, 1, decode, worker_flags=("--drain-timeout-s", "60"), router_flags=ALL_REMOTE)
    stack.workers(role)[0].command += two_hosts(port)
    try:
        with stack:
            system = System(stack)
            system.wait_for_workers()
            yield system, host
    finally:
        host.end()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_same_answers(role: str, tmp_path: Path, forge: None, tiny_oracle: Any, random_prompts: Any) -> None:
    """P on two hosts to D on one, and the other way round: at once, and again from the prefix caches."""
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=1)
    answers = [tiny_oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    with spread_service(tmp_path, role) as (system, host):
        assert len(host.children()) == 1
        for _ in range(2):
            assert system.generate(prompts, max_tokens=NUM_TOKENS) == answers
        turns = [prompt + answer + [10, 11, 12] for prompt, answer in zip(prompts[:6], answers, strict=False)]
        assert system.generate(turns, max_tokens=NUM_TOKENS) == [tiny_oracle.greedy(t, NUM_TOKENS) for t in turns]
        assert system.metric("diptych_kv_blocks_skipped", "decode") > 0
        system.settle()


@pytest.mark.parametrize("victim", ["the rank host", "a rank", "the worker"])
def test_a_death_costs_no_token_and_the_host_joins_again(
    tmp_path: Path, forge: None, random_prompts: Any, victim: str
) -> None:
    prompts = random_prompts((30, 200, 700) * 3, vocab_size=256, seed=3)
    with spread_service(tmp_path, "decode", decode=2) as (system, host):
        expected = system.generate(prompts, max_tokens=LONG)
        worker, results = system.stack.workers("decode")[0], list[Any]()
        (rank,) = host.children()
        asking = threading.Thread(
            target=lambda: results.append(system.generate(prompts, max_tokens=LONG, cache_salt="killed"))
        )
        asking.start()
        wait_for_streams(system, 3)
        os.kill({"the rank host": host.pid, "a rank": rank, "the worker": worker.pid}[victim], signal.SIGKILL)
        worker.wait(time.monotonic() + GONE_S)
        if victim != "the worker":
            assert (worker.returncode, worker.forced) == (1, False), worker.log_tail()
        wait_until(lambda: not is_running(rank), "the rank on the other host ends", GONE_S)
        asking.join(PATIENCE_S)
        assert results == [expected]
        if victim == "the rank host":
            host.end()
            host.start()
        come_back(system, worker)
        assert system.generate(prompts, max_tokens=NUM_TOKENS) == [tokens[:NUM_TOKENS] for tokens in expected]
        system.settle()


def test_a_host_that_is_asked_to_end_hands_the_streams_over(tmp_path: Path, forge: None, random_prompts: Any) -> None:
    """The other worker is started while they run, so that all of them are on two hosts."""
    prompts = random_prompts((30, 100, 200, 350), vocab_size=256, seed=4)
    with spread_service(tmp_path, "decode", decode=2) as (system, host):
        expected = system.generate(prompts, max_tokens=1000)
        (worker, other), results = system.stack.workers("decode"), list[Any]()
        other.kill()
        asking = threading.Thread(target=lambda: results.append(system.generate(prompts, max_tokens=1000)))
        asking.start()
        wait_until(lambda: sum(samples(worker, "vllm:num_requests_running")) == len(prompts), "streams", PATIENCE_S)
        come_back(system, other)
        before = handovers(system)
        os.kill(host.pid, signal.SIGTERM)
        worker.wait(time.monotonic() + GONE_S)
        assert (worker.returncode, worker.forced) == (0, False), worker.log_tail()
        asking.join(PATIENCE_S)
        assert results == [expected]
        assert handovers(system) > before
        host.wait(time.monotonic() + GONE_S)
        assert (host.returncode, host.forced) == (0, False), host.log_tail()

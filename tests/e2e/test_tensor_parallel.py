"""Workers of two ranks beside workers of one: the same answers, through transfers, preemption, deaths, hand-overs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stack import StackProcess
from common.engine.ranks.liveness import SILENT_S

from ..rig import System, make_stack, samples, wait_until
from .test_handover import come_back, handovers, leave, wait_for_streams

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.slow]

TWO = ("--tensor-parallel-size", "2")
ALL_REMOTE = ("--local-prefill-threshold", "0", "--drain-timeout-s", "60")
LENGTHS = (1, 15, 16, 17, 40, 64, 100, 200, 333, 600)
NUM_TOKENS = 12
PATIENCE_S = 120.0
GONE_S = 60.0
LONG = 400


def ranks_of(worker: StackProcess) -> list[int]:
    """The processes that a worker started for its other ranks."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            is_rank = folder.name.isdigit() and b"common.engine.ranks" in (folder / "cmdline").read_bytes()
            if is_rank and int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == worker.pid:
                found.append(int(folder.name))
        except OSError:  # it ended meanwhile
            continue
    return found


def is_running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("prefill", "decode"), [(TWO, ()), ((), TWO), (TWO, TWO)], ids=["P2-D1", "P1-D2", "P2-D2"])
def test_the_same_answers(
    system_of: Any, tiny_oracle: Any, random_prompts: Any, prefill: tuple[str, ...], decode: tuple[str, ...]
) -> None:
    """At once, again from both prefix caches, with more blocks cached than the transfer brings, and preempted."""
    system = system_of(
        router_flags=ALL_REMOTE,
        prefill_flags=(*prefill, "--max-num-batched-tokens", "64"),
        decode_flags=(*decode, "--num-blocks", "48", "--watermark", "0"),
    )
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=1)
    answers = [tiny_oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    for _ in range(2):
        assert system.generate(prompts, max_tokens=NUM_TOKENS) == answers
    for _ in range(2):  # alone, it finds its own blocks on the decode worker
        assert system.generate(prompts[-1:], max_tokens=NUM_TOKENS) == answers[-1:]
    assert system.metric("diptych_kv_blocks_skipped", "decode") > 0
    turns = [prompt + answer + [10, 11, 12] for prompt, answer in zip(prompts[:6], answers, strict=False)]
    assert system.generate(turns, max_tokens=NUM_TOKENS) == [tiny_oracle.greedy(turn, NUM_TOKENS) for turn in turns]
    crowd = random_prompts((40,) * 10, vocab_size=256, seed=6)
    assert system.generate(crowd, max_tokens=80) == [tiny_oracle.greedy(prompt, 80) for prompt in crowd]
    assert system.metric("vllm:num_preemptions", "decode") > 0
    assert system.transfers("shm") > 0 and system.transfers("tcp") == 0  # of several ranks through a ring


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, forge: None) -> Iterator[System]:
    """Two workers of each kind; the first of each has two ranks."""
    stack = make_stack(
        tmp_path_factory.mktemp("mixed"), 2, 2, worker_flags=("--drain-timeout-s", "60"), router_flags=ALL_REMOTE
    )
    for role in ("prefill", "decode"):
        stack.workers(role)[0].command += TWO
    with stack:
        system = System(stack)
        system.wait_for_workers()
        yield system


def test_sizes_of_all_kinds_in_one_service(mixed: System, tiny_oracle: Any, random_prompts: Any) -> None:
    prompts = random_prompts(LENGTHS * 2, vocab_size=256, seed=2)
    assert mixed.generate(prompts, max_tokens=NUM_TOKENS) == [tiny_oracle.greedy(p, NUM_TOKENS) for p in prompts]
    for again in range(3, 13):  # on a busy machine prompts may come one by one, all to the same worker
        if all(mixed.requests_of(worker) for worker in mixed.stack.workers()):
            break
        mixed.generate(random_prompts(LENGTHS * 2, vocab_size=256, seed=again), max_tokens=NUM_TOKENS)
    for worker in mixed.stack.workers():
        assert mixed.requests_of(worker) > 0, f"{worker.name} got nothing"
        assert len(ranks_of(worker)) == (1 if worker.name.endswith("-0") else 0)
    mixed.settle()


def lose_rank(
    system: System, random_prompts: Any, role: str, sent: signal.Signals, within_s: float = 0.0
) -> tuple[StackProcess, int]:
    """Send a signal to rank 1 of a worker while streams run, which costs none of them a token: its worker ends."""
    prompts = random_prompts((30, 200, 700) * 3, vocab_size=256, seed=3)
    expected = system.generate(prompts, max_tokens=LONG)
    victim, results = system.stack.workers(role)[0], list[Any]()
    (rank,) = ranks_of(victim)
    salted = {"max_tokens": LONG, "cache_salt": f"{sent.name} {role}"}
    asking = threading.Thread(target=lambda: results.append(system.generate(prompts, **salted)))
    asking.start()
    wait_for_streams(system, 3)
    os.kill(rank, sent)
    victim.wait(time.monotonic() + within_s + GONE_S)
    assert (victim.returncode, victim.forced) == (1, False), victim.log_tail()
    asking.join(PATIENCE_S)
    assert results == [expected]
    return victim, rank


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_rank_costs_no_token(mixed: System, random_prompts: Any, role: str) -> None:
    """Its worker ends, and the other one goes on with the streams."""
    victim, _ = lose_rank(mixed, random_prompts, role, signal.SIGKILL)
    come_back(mixed, victim)
    mixed.settle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_frozen_rank_costs_no_token_and_is_named(mixed: System, random_prompts: Any, role: str) -> None:
    """Neither dead nor there: the router goes on without its worker, which ends at the deadline of sums and signs."""
    victim, rank = lose_rank(mixed, random_prompts, role, signal.SIGSTOP, SILENT_S)
    assert victim.log is not None and "rank 1 has sent no heartbeat for" in victim.log.read_text()
    wait_until(lambda: not is_running(rank), "the frozen rank ends", GONE_S)
    come_back(mixed, victim)
    mixed.settle()


def test_ranks_end_with_their_worker(mixed: System) -> None:
    victim = mixed.stack.workers("decode")[0]
    (rank,) = ranks_of(victim)
    victim.kill()
    wait_until(lambda: not is_running(rank), "the other rank ends", GONE_S)
    come_back(mixed, victim)


@pytest.mark.parametrize(("leaving", "num_tokens"), [(0, 1000), (1, 3000)], ids=["D2-D1", "D1-D2"])
def test_a_worker_that_ends_hands_its_streams_over(
    mixed: System, random_prompts: Any, leaving: int, num_tokens: int
) -> None:
    """The other one is started while they run, so that all of them are there. Two ranks take 7 s to start."""
    prompts = random_prompts((30, 100, 200, 350), vocab_size=256, seed=4)
    expected = mixed.generate(prompts, max_tokens=num_tokens)
    workers, results = mixed.stack.workers("decode"), list[Any]()
    victim, other = workers[leaving], workers[1 - leaving]
    other.kill()
    ranks = ranks_of(victim)
    asking = threading.Thread(target=lambda: results.append(mixed.generate(prompts, max_tokens=num_tokens)))
    asking.start()
    wait_until(lambda: sum(samples(victim, "vllm:num_requests_running")) == len(prompts), "all streams", PATIENCE_S)
    come_back(mixed, other)
    before = handovers(mixed)
    leave(victim)
    asking.join(PATIENCE_S)
    assert results == [expected]
    wait_until(lambda: not any(is_running(rank) for rank in ranks), "the ranks end", GONE_S)
    come_back(mixed, victim)
    assert handovers(mixed) > before
    mixed.settle()

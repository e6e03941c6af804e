"""A decode worker that runs out of blocks hands answers over to one that has room, instead of preempting them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from benchmarks.stack import StackProcess, StackSettings

from ..paced import PacedStack, answer
from ..rig import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200), pytest.mark.slow]

NUM_ANSWERS, NUM_TOKENS, PROMPT_LEN = 6, 320, 64
NUM_BLOCKS = 96
"""Of a decode worker: for four of the answers, of 24 blocks each, not for six."""
PATIENCE_S = 60.0


def prompt(number: int) -> list[int]:
    return [(31 * number + 7 * place) % 256 for place in range(PROMPT_LEN)]


def ask(url: str, number: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    body = {"model": "paced", "prompt": prompt(number), "max_tokens": num_tokens, "temperature": 0}
    reply = httpx.post(
        f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=PATIENCE_S, trust_env=False
    )
    assert reply.status_code == 200, reply.text
    tokens: list[int] = reply.json()["choices"][0]["token_ids"]
    return tokens


def total(url: str, name: str) -> float:
    page = httpx.get(f"{url}/metrics", timeout=PATIENCE_S, trust_env=False).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))


def crowded(stack: PacedStack, url: str) -> tuple[list[list[int]], float]:
    """Six answers that begin while one of two decode workers is frozen: their tokens, and how many were preempted."""
    busy, frozen = stack.workers("decode")
    for number in range(4):  # both learn the times of their steps
        ask(url, 100 + number, 24)
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: ready(url, frozen) == 0, "the frozen worker is dead", PATIENCE_S)
        with ThreadPoolExecutor(NUM_ANSWERS) as pool:
            answers = [pool.submit(ask, url, number) for number in range(NUM_ANSWERS)]
            wait_until(running(busy, NUM_ANSWERS), "all answers run", PATIENCE_S)
            os.kill(frozen.pid, signal.SIGCONT)
            found = [one.result(PATIENCE_S) for one in answers]
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    return found, sum(total(worker.http_url, "vllm:num_preemptions_total") for worker in (busy, frozen))


def ready(url: str, worker: StackProcess) -> float:
    page = httpx.get(f"{url}/metrics", timeout=PATIENCE_S, trust_env=False).text
    lines = [line for line in page.splitlines() if line.startswith("diptych_worker_state")]
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if f'worker="{worker.name}"' in line and 'state="ready"' in line
    )


def running(worker: StackProcess, count: int) -> Callable[[], bool]:
    return lambda: total(worker.http_url, "vllm:num_requests_running") >= count


@pytest.mark.parametrize("balances", [True, False], ids=["balanced", "left alone"])
def test_answers_move_before_blocks_run_out(tmp_path: Path, forge: None, balances: bool) -> None:
    flags = ("--local-prefill-threshold", "0") + (() if balances else ("--no-balance-decode",))
    began = time.monotonic()
    blocks = ("--num-blocks", str(NUM_BLOCKS), "--watermark", "0")
    with PacedStack(StackSettings(1, 2, router_flags=flags, decode_flags=blocks, log_dir=tmp_path / "logs")) as stack:
        url = stack.router.http_url
        wait_until(lambda: all(ready(url, worker) for worker in stack.workers("decode")), "both ready", PATIENCE_S)
        found, num_preempted = crowded(stack, url)
        num_moved = total(url, "diptych_balancing_moves_total{")
        print(f"preempted {num_preempted:g}, moved {num_moved:g}, {time.monotonic() - began:.1f} s")
    assert found == [answer(prompt(number), NUM_TOKENS) for number in range(NUM_ANSWERS)]
    if balances:
        assert num_moved >= 1 and num_preempted <= 1
    else:
        assert num_moved == 0 and num_preempted >= 2

"""Prefixes that are pulled from the worker that has them, in real processes whose answers depend on every block."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from benchmarks.simulator.world.coefficients import StepCoefficients
from benchmarks.stack import StackProcess, StackSettings

from ..paced import Coefficients, PacedStack, answer
from ..rig import READY_S, System, samples, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
PACE = Coefficients(
    prefill=StepCoefficients(fixed_s=0.004, token_s=1e-3), decode=StepCoefficients(fixed_s=0.004, token_s=1e-3)
)
"""A millisecond for a token of a prompt: any pull of a few blocks is faster."""
LONG, OWN = 320, 300
"""Tokens of a shared prefix, and of each prompt behind it."""


def prompt(length: int, seed: int) -> list[int]:
    return [(31 * seed + 7 * place + place * place * seed) % 256 for place in range(length)]


@pytest.fixture(scope="module", params=["auto", "tcp"])
def system(request: Any, tmp_path_factory: pytest.TempPathFactory, forge: None) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("pulls")
    (folder / "pace.json").write_bytes(msgspec.json.encode(PACE))
    with PacedStack(
        StackSettings(
            2,
            1,
            worker_flags=("--kv-transport", request.param, "--kv-memory-gib", "0.1"),
            router_flags=("--local-prefill-threshold", "0", "--worker-timeout-s", "2"),
            log_dir=folder / "logs",
            ready_timeout_s=READY_S,
        ),
        coefficients=folder / "pace.json",
    ) as stack:
        found = System(stack)
        found.wait_for_workers()
        yield found


async def ask(client: httpx.AsyncClient, tokens: list[int], count: int) -> dict[str, Any]:
    body = {"model": "paced", "prompt": tokens, "max_tokens": count, "temperature": 0, "return_token_ids": True}
    began = time.monotonic()
    reply = await client.post("/v1/completions", json={**body, "ignore_eos": True})
    assert reply.status_code == 200, reply.text
    found = reply.json()
    assert found["choices"][0]["token_ids"] == answer(tokens, count)
    return {
        "took_s": time.monotonic() - began,
        "cached": found["usage"]["prompt_tokens_details"]["cached_tokens"],
    }


def asked(system: System, *asks: tuple[list[int], int], between_s: float = 0.0) -> list[dict[str, Any]]:
    """Each a moment after the one before; all answers are right."""

    async def all_of() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=system.stack.url, timeout=60, trust_env=False) as client:
            tasks = []
            for tokens, count in asks:
                tasks.append(asyncio.create_task(ask(client, tokens, count)))
                await asyncio.sleep(between_s)
            return list(await asyncio.gather(*tasks))

    return asyncio.run(all_of())


def peer_tokens(worker: StackProcess) -> float:
    return sum(samples(worker, "diptych_prefix_hit_tokens", 'tier="peer"'))


def pulls(system: System, outcome: str) -> float:
    return sum(sum(samples(w, "diptych_kv_pulls", f'outcome="{outcome}"')) for w in system.stack.workers())


def holder_of(system: System, tokens: list[int]) -> tuple[StackProcess, StackProcess]:
    """Let a prefill worker have computed the tokens; it, and the other one. The router has heard of it."""
    before = {worker.name: sum(samples(worker, "diptych_kv_blocks", 'state="cached"')) for worker in workers(system)}
    asked(system, (tokens, 1))
    found = [w for w in workers(system) if sum(samples(w, "diptych_kv_blocks", 'state="cached"')) > before[w.name]]
    assert len(found) == 1
    time.sleep(1.0)  # a heartbeat
    (other,) = [worker for worker in workers(system) if worker is not found[0]]
    return found[0], other


def workers(system: System) -> list[StackProcess]:
    return system.stack.workers("prefill")


def test_a_busy_holder_lends(system: System) -> None:
    """It would take seconds for all; the other worker has nothing, and would take 320 ms more for each prefix."""
    prefix = prompt(LONG, 1)
    asked(system, (prompt(64, 90), 1), (prompt(64, 91), 1))  # both know their pace
    _, other = holder_of(system, prefix)
    found = asked(system, *(([*prefix, *prompt(OWN, 10 + number)], 4) for number in range(6)))
    cached = [one["cached"] for one in found]
    assert set(cached) <= {0, LONG} and cached.count(LONG) >= 4, "a pull that comes late is computed instead"
    assert peer_tokens(other) >= LONG
    system.settle()


def test_an_answer_comes_back_to_a_prefill_worker(system: System) -> None:
    """Only the decode worker computed it, and here decode workers compute no prompts."""
    turn = prompt(64, 4)
    before = sum(peer_tokens(worker) for worker in workers(system))
    asked(system, (turn, 120))
    system.settle()
    time.sleep(1.0)
    (found,) = asked(system, ([*turn, *answer(turn, 120), *prompt(9, 5)], 4))
    assert found["cached"] == (64 + 119) // 16 * 16
    assert sum(peer_tokens(worker) for worker in workers(system)) > before
    system.settle()


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "dead"])
def test_a_holder_that_freezes_or_dies_costs_time_alone(system: System, fault: signal.Signals) -> None:
    prefix = prompt(LONG, 6 + fault)
    holder, other = holder_of(system, prefix)
    asks = [([*prefix, *prompt(16, 30 + number)], 4) for number in range(4)]
    if fault is signal.SIGKILL:
        holder.kill()
    else:
        holder.send_signal(fault)
    try:
        found = asked(system, *asks, between_s=0.05)
    finally:
        if fault is signal.SIGKILL:
            system.stack.restart(holder)
        else:
            holder.send_signal(signal.SIGCONT)
    assert len(found) == 4
    system.wait_for_workers()
    wait_until(lambda: other.alive and holder.alive, "both are there")
    system.settle()

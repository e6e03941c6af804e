"""Answers that must match a grammar, through both pools: whoever computes them, and however often they move."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from ..rig import IS_OWN_ENGINE, MODEL, PROBE_TIMEOUT_S, wait_until
from .test_failures import ALL_REMOTE, PATIENCE_S, SLOW_PREFILL, is_busy, num_moves, run_with, states
from .test_handover import handovers

pytestmark = pytest.mark.e2e

LONG = {"regex": "([a-f]{2} [0-9]{3};){114}"}
"""798 characters: two short of NUM_TOKENS."""
NUM_TOKENS = 800


def schema(number: int) -> dict[str, Any]:
    """Of bounded texts: the tiny model would go on for ever."""
    members = {
        "id": {"const": number},
        "kind": {"enum": ["a", "bb", "ccc"]},
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "parts": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    }
    return {"type": "object", "properties": members, "required": [*members], "additionalProperties": False}


def body_of(number: int) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema(number)}}
    sampling = {"temperature": 0} if number % 2 else {"temperature": 1.2, "seed": number}
    prompt = f"Thing number {number}. " * (1 + number % 7)
    free = number % 5 == 4
    return {"model": MODEL, "prompt": prompt, "max_tokens": 300, **sampling} | (
        {"max_tokens": 40, "ignore_eos": True} if free else {"response_format": wanted}
    )


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1), (0, 1), (2, 2)], ids=["1P1D", "0P1D", "2P2D"])
def test_answers_match_their_schemas_alone_and_in_a_batch(system_of: Any, shape: tuple[int, int]) -> None:
    system = system_of(*shape, router_flags=ALL_REMOTE if shape[0] else ())
    numbers = range(20)
    with httpx.Client(base_url=system.stack.url, timeout=120, trust_env=False) as client:

        def ask(number: int) -> str:
            reply = client.post("/v1/completions", json=body_of(number))
            assert reply.status_code == 200, reply.text
            text: str = reply.json()["choices"][0]["text"]
            return text

        with ThreadPoolExecutor(len(numbers)) as pool:
            together = list(pool.map(ask, numbers))
        for number in numbers:
            assert together[number] == ask(number)
            if number % 5 != 4:
                thing = json.loads(together[number])
                assert thing["id"] == number and re.fullmatch("[a-z]{1,8}", thing["name"]) and thing["parts"]


def generate_long(system: Any, random_prompts: Any, disturb: Callable[..., list[list[int]]]) -> None:
    """Answers of one long regular expression, undisturbed and then disturbed: the same, and all of the expression."""
    prompts = random_prompts((30, 200, 700, 1500) * 4, vocab_size=256, seed=11)
    draws = {"temperature": 1.0, "seed": 3} if IS_OWN_ENGINE else {"temperature": 0}
    params = {"structured_outputs": LONG, **draws}
    expected = system.generate(prompts, max_tokens=NUM_TOKENS, **params)
    for tokens in expected:
        assert re.fullmatch(LONG["regex"], bytes(token for token in tokens if token < 256).decode())
    assert disturb(prompts, **params) == expected


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_answer_whose_worker_dies_keeps_to_its_grammar(system_of: Any, random_prompts: Any, role: str) -> None:
    """Its first tokens come with it: the grammar's place is found again by them."""
    system = system_of(2, 2, router_flags=ALL_REMOTE, prefill_flags=SLOW_PREFILL)
    victim = system.stack.workers(role)[0]

    def disturb(prompts: list[list[int]], **params: Any) -> list[list[int]]:
        return run_with(system, prompts, victim, victim.kill, max_tokens=NUM_TOKENS, cache_salt=role, **params)

    generate_long(system, random_prompts, disturb)
    system.stack.restart(victim)


@pytest.mark.slow
@pytest.mark.own_engine
def test_an_answer_that_is_handed_over_keeps_to_its_grammar(system_of: Any, random_prompts: Any) -> None:
    system = system_of(2, 2, router_flags=ALL_REMOTE, prefill_flags=SLOW_PREFILL)
    wait_until(lambda: states(system).count("ready") == 4, "all workers are used")
    victim = system.stack.workers("decode")[0]

    def disturb(prompts: list[list[int]], **params: Any) -> list[list[int]]:
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(system.generate, prompts, max_tokens=NUM_TOKENS, cache_salt="handed over", **params)
            wait_until(lambda: is_busy(system, victim), f"{victim.name} is busy")
            victim.terminate()
            return coming.result(PATIENCE_S)

    before = handovers(system)
    generate_long(system, random_prompts, disturb)
    assert handovers(system) > before
    victim.wait(time.monotonic() + PATIENCE_S)
    system.stack.restart(victim)


@pytest.mark.parametrize(
    "grammar",
    [{"regex": "("}, {"grammar": "start: nothing"}, pytest.param({"json": {"type": "no"}}, marks=pytest.mark.slow)],
)
def test_what_cannot_be_matched_is_the_clients_error(http: httpx.Client, grammar: dict[str, Any]) -> None:
    reply = http.post("/v1/completions", json={"model": MODEL, "prompt": "a", "structured_outputs": grammar})
    assert reply.status_code == 400 and reply.json()["error"]["param"].startswith("structured_outputs.")


ENDLESS = {"json": {"type": "integer", "multipleOf": 99999989}}
FORCED = [{"regex": f"(a{{4000}}){{{500 + i}}}"} for i in range(12)]
TRIVIAL = {"json": {"type": "boolean"}}
LONG_S = 300.0
"""Grammars at their bounds, and streams beside them, on a busy machine."""


@pytest.mark.slow
def test_grammars_beyond_their_bounds_are_refused_and_nobody_notices(system_of: Any, random_prompts: Any) -> None:
    """They took a minute and gigabytes of the engine, of one worker after the other."""
    system = system_of(2, 2, router_flags=ALL_REMOTE, prefill_flags=SLOW_PREFILL)
    wait_until(lambda: states(system).count("ready") == 4, "all workers are used")
    prompts = random_prompts((30, 90, 200, 340, 500, 700), vocab_size=256, seed=17)
    expected = system.generate(prompts, max_tokens=600, cache_salt="alone")
    pids, moves = {worker.name: worker.pid for worker in system.stack.workers()}, num_moves(system)
    over, not_ready, ready = threading.Event(), [], []

    def probe() -> None:
        while not over.is_set():
            reply = httpx.get(f"{system.stack.url}/ready", timeout=PROBE_TIMEOUT_S, trust_env=False)
            (ready if reply.status_code == 200 else not_ready).append(reply.text)
            over.wait(0.1)

    with httpx.Client(base_url=system.stack.url, timeout=LONG_S, trust_env=False) as client:

        def ask(form: dict[str, Any]) -> httpx.Response:
            """503 says that the machine was too busy to look at the grammar: it is asked again, as clients do."""
            body = {"model": MODEL, "prompt": "Say.", "max_tokens": 20, "structured_outputs": form}
            deadline = time.monotonic() + LONG_S
            while (reply := client.post("/v1/completions", json=body)).status_code == 503:
                assert time.monotonic() < deadline, reply.text
                time.sleep(1.0)
            return reply

        with ThreadPoolExecutor(20) as pool:
            probing = pool.submit(probe)
            try:
                streams = pool.submit(
                    system.generate,
                    prompts,
                    max_tokens=600,
                    ignore_eos=True,
                    cache_salt="beside",
                    deadline_s=LONG_S,
                )
                wait_until(lambda: any(is_busy(system, worker) for worker in system.stack.workers("decode")), "busy")
                offenders = [pool.submit(ask, form) for form in (ENDLESS, *FORCED)]
                served = ask(TRIVIAL)
                refused = [offender.result(LONG_S) for offender in offenders]
                assert streams.result(LONG_S) == expected
            finally:
                over.set()
            probing.result(PATIENCE_S)
    assert served.status_code == 200 and served.json()["choices"][0]["text"] in ("true", "false")
    for reply in refused:
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["type"] == "invalid_request_error" and error["param"].startswith("structured_outputs."), error
    assert "too complex" in refused[0].json()["error"]["message"]
    assert num_moves(system) == moves and states(system) == ["ready"] * 4
    assert {worker.name: worker.pid for worker in system.stack.workers()} == pids
    assert ready and not not_ready

"""Beams are those of a plain loop over the oracle, wherever they are computed and whatever happens to their workers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from benchmarks.stack import StackProcess

from ..rig import PROBE_TIMEOUT_S, samples, wait_until
from .test_token_rules import ALL_REMOTE, ALLOWED, BAD

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

Ban = Callable[[bytes], Collection[int]]
"""What may not follow an answer so far."""
ENDS = (257, 259)
STOPS = (*b" e.",)
WIDTH, NUM_TOKENS = 3, 9
LONG = {"use_beam_search": True, "n": 4, "max_tokens": 100, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}


def no_bad_word(said: bytes) -> set[int]:
    return {ord(word[-1]) for word in BAD if said.endswith(word[:-1].encode())}


RULES: dict[str, tuple[dict[str, Any], Ban, tuple[int, ...]]] = {
    "free": ({"ignore_eos": True}, lambda said: (), ()),
    "ends": ({"stop_token_ids": STOPS}, lambda said: (), (*ENDS, *STOPS)),
    "min_tokens": (
        {"stop_token_ids": STOPS, "min_tokens": 4},
        lambda said: (*ENDS, *STOPS) if len(said) < 4 else (),
        (*ENDS, *STOPS),
    ),
    "bad_words": ({"bad_words": BAD, "ignore_eos": True}, no_bad_word, ()),
    "allowed_token_ids": (
        {"allowed_token_ids": ALLOWED, "bad_words": BAD, "ignore_eos": True, "logprobs": 0},
        lambda said: no_bad_word(said) | ({*range(261)} - {*ALLOWED}),
        (),
    ),
}


def beams_of(oracle: Any, prompt: list[int], banned: Ban, ends: Collection[int]) -> list[tuple[float, list[int]]]:
    """The best continuations with their mean log-probability.

    In each step every beam grows by its likeliest tokens: twice as many as there are beams, or one more for each end.
    """
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for step in range(NUM_TOKENS):
        grown: list[tuple[float, list[int]]] = []
        for total, tokens in running:
            row = enumerate(oracle.logprobs([*prompt, *tokens, 0])[-1].tolist())
            said = bytes(min(token, 255) for token in tokens)
            free = [(value, token) for token, value in row if token not in banned(said)]
            for value, token in sorted(free, reverse=True)[: WIDTH + max(WIDTH, len(ends))]:
                if token in ends:
                    finished.append(((total + value) / max(1, step), [*tokens, token]))
                else:
                    grown.append((total + value, [*tokens, token]))
        running = sorted(grown, reverse=True)[:WIDTH]
    finished += [(total / NUM_TOKENS, tokens) for total, tokens in running]
    return sorted(finished, reverse=True)[:WIDTH]


def search(system: Any, **body: Any) -> Any:
    reply = httpx.post(f"{system.stack.url}/v1/completions", json=body, timeout=240, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.own_engine if name == "allowed_token_ids" else ()) for name in RULES],
)
def test_beams_are_those_of_a_plain_loop(system_of: Any, tiny_oracle: Any, random_prompts: Any, name: str) -> None:
    rule, banned, ends = RULES[name]
    prompts = random_prompts((5, 47), vocab_size=256, seed=12)
    expected = [beams_of(tiny_oracle, prompt, banned, ends) for prompt in prompts]
    body = {"use_beam_search": True, "n": WIDTH, "max_tokens": NUM_TOKENS, "logprobs": 3, "return_token_ids": True}
    for shape in ((0, 1), (1, 1)):
        system = system_of(*shape, router_flags=ALL_REMOTE)
        for prompt, best in zip(prompts, expected, strict=True):
            choices = search(system, prompt=prompt, **body | rule)["choices"]
            assert [choice["token_ids"] for choice in choices] == [tokens for _, tokens in best]
            for choice, (mean, tokens) in zip(choices, best, strict=True):
                ended = tokens[-1] in ends
                assert choice["finish_reason"] == ("stop" if ended else "length")
                total = sum(choice["logprobs"]["token_logprobs"])
                assert total / max(1, len(tokens) - ended) == pytest.approx(mean, abs=1e-3)


def counted(system: Any, answer: Any, what: str) -> int:
    """The number that the router's line about an answer has for this."""
    found: list[str] = []

    def is_there() -> bool:
        found[:] = re.findall(rf" id={answer['id']} .* {what}=(\d+)", system.stack.router.log.read_text())
        return bool(found)

    wait_until(is_there, f"the router tells of {answer['id']}")
    return int(found[0])


def booked(system: Any, worker: StackProcess) -> int:
    """Requests that the router has at a worker."""
    load = httpx.get(f"{system.stack.url}/load", timeout=PROBE_TIMEOUT_S, trust_env=False).json()
    return sum(one["num_booked_requests"] for one in load["workers"] if one["worker_id"] == worker.name)


def moved(system: Any) -> float:
    """How often requests moved to another worker."""
    return sum(samples(system.stack.router, "diptych_retries"))


@pytest.mark.parametrize("shape", [(2, 1), (0, 2)], ids=["prefill", "decode"])
def test_a_worker_that_dies_in_the_middle_of_a_search_changes_no_beam(
    system_of: Any, random_prompts: Any, shape: tuple[int, int]
) -> None:
    """It is frozen with steps of the search before it is killed, so the search cannot end without a move."""
    (prompt,) = random_prompts((130,), vocab_size=256, seed=3)
    expected = search(system_of(0, 1), prompt=prompt, **LONG)
    system = system_of(*shape, router_flags=ALL_REMOTE)
    workers = system.stack.workers("prefill" if shape[0] else "decode")
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(search, system, prompt=prompt, **LONG)
        wait_until(lambda: max(map(system.requests_of, workers)) >= 40, "ten tokens of each beam are found")
        victim = max(workers, key=system.requests_of)
        victim.pause()
        wait_until(lambda: booked(system, victim) + moved(system) > 0, "a step waits for the frozen worker, or moved")
        victim.kill()
        found = asking.result()
    assert counted(system, found, "attempts") > 1
    system.stack.restart(victim)
    for got, right in zip(found["choices"], expected["choices"], strict=True):
        assert (got["token_ids"], got["finish_reason"]) == (right["token_ids"], right["finish_reason"])
        assert got["logprobs"]["token_logprobs"] == pytest.approx(right["logprobs"]["token_logprobs"], abs=1e-3)


@pytest.mark.own_engine
def test_a_search_whose_steps_are_preempted_finds_the_same_beams(system_of: Any, random_prompts: Any) -> None:
    """Its prompt takes 25 steps beside ten streams, whose tokens need more blocks meanwhile than there are.

    The youngest sequence is preempted, so the worker sleeps until it has all streams and then the search.
    """
    *prompts, long = random_prompts((*[40] * 10, 400), vocab_size=256, seed=4)
    body = {**LONG, "prompt": long, "max_tokens": 10}
    expected = search(system_of(0, 1), **body)
    system = system_of(0, 1, decode_flags=("--num-blocks", "62", "--watermark", "0", "--local-prefill-chunk", "16"))
    (worker,) = system.stack.workers()
    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        worker.pause()
        try:
            streams = [pool.submit(search, system, prompt=each, max_tokens=100, ignore_eos=True) for each in prompts]
            wait_until(lambda: booked(system, worker) == len(prompts), "the worker is sent the streams")
            asking = pool.submit(search, system, **body)
            wait_until(lambda: booked(system, worker) > len(prompts), "the worker is sent the search")
        finally:
            worker.resume()
        found = asking.result()
        assert all(stream.result() for stream in streams)
    assert counted(system, found, "preemptions") > 0
    assert [choice["token_ids"] for choice in found["choices"]] == [
        choice["token_ids"] for choice in expected["choices"]
    ]

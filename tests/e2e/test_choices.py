"""One request for several choices, of which some lose their decode worker: the answer is that of the unfailed run."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from benchmarks.stack import StackProcess

from ..rig import MODEL, PROBE_TIMEOUT_S, samples, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.own_engine]

NUM_TOKENS = 400
LOGPROB_TOLERANCE = 1e-3
PATIENCE_S = 120.0
PIECE_LEN = 5
TRIES = 10
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

Answer = dict[str, Any]


def whole(url: str, body: dict[str, Any]) -> Answer:
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False)
    assert reply.status_code == 200, reply.text
    answer: Answer = reply.json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return answer


def streamed(url: str, body: dict[str, Any]) -> Answer:
    """The chunks of each choice put together, in the shape of a whole answer."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    for event in map(json.loads, lines[:-1]):
        usage = event.get("usage") or usage
        for part in event["choices"]:
            empty = {"text": "", "token_ids": [], "finish_reason": None, "logprobs": {name: [] for name in LISTS}}
            choice = choices.setdefault(part["index"], {"index": part["index"], **empty})
            assert choice["finish_reason"] is None, "a choice goes on behind its end"
            choice["text"] += part["text"]
            choice["token_ids"] += part.get("token_ids") or []
            choice["finish_reason"] = part["finish_reason"]
            for name in LISTS:
                choice["logprobs"][name] += (part.get("logprobs") or {}).get(name) or []
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def check_same(got: Answer, expected: Answer) -> None:
    for choice, should in zip(got["choices"], expected["choices"], strict=True):
        for name in ("index", "token_ids", "text", "finish_reason"):
            assert choice[name] == should[name], f"choice {should['index']}: another {name}"
        given, right = choice["logprobs"], should["logprobs"]
        assert [given["tokens"], given["text_offset"]] == [right["tokens"], right["text_offset"]]
        assert given["token_logprobs"] == pytest.approx(right["token_logprobs"], abs=LOGPROB_TOLERANCE)
        for top, right_top in zip(given["top_logprobs"], right["top_logprobs"], strict=True):
            assert top == pytest.approx(right_top, abs=LOGPROB_TOLERANCE)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert got["usage"][name] == expected["usage"][name], name


def late_piece(text: str) -> str:
    """A piece of the last third of a text that is nowhere before."""
    starts = range(len(text) * 2 // 3, len(text) - PIECE_LEN)
    return next(piece for at in starts if text.find(piece := text[at : at + PIECE_LEN]) == at)


def num_takeovers(system: Any) -> float:
    return sum(samples(system.stack.router, "diptych_takeovers"))


def num_ready(system: Any) -> int:
    workers = httpx.get(f"{system.stack.url}/load", timeout=PROBE_TIMEOUT_S, trust_env=False).json()["workers"]
    return sum((worker["role"], worker["state"]) == ("decode", "ready") for worker in workers)


def is_running_some(worker: StackProcess) -> bool:
    return sum(samples(worker, "vllm:num_requests_running")) >= 1


def is_shared(decode: list[StackProcess], asking: Future[Answer]) -> bool:
    """Waits until each worker has some of the choices; False where all have ended: one worker had room for all."""
    wait_until(lambda: asking.done() or all(map(is_running_some, decode)), "choices are generated", PATIENCE_S)
    return not asking.done()


@pytest.fixture
def system(system_of: Any) -> Any:
    return system_of(1, 2, router_flags=("--local-prefill-threshold", "0"))


@pytest.mark.parametrize(("ask", "num_prompts"), [(whole, 1), (streamed, 1), (streamed, 2)])
def test_choices_that_lose_their_worker_are_those_of_the_unfailed_run(
    system: Any, random_prompts: Any, ask: Any, num_prompts: int
) -> None:
    prompts = random_prompts((150, 90)[:num_prompts], vocab_size=256, seed=21)
    body = {
        "model": MODEL,
        "prompt": prompts if num_prompts > 1 else prompts[0],
        "n": 4 // num_prompts,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": 5,
        "logprobs": 2,
        "return_token_ids": True,
    }
    free = whole(system.stack.url, body)
    # Two of the four end at a stop string, late, the others by their number of tokens.
    body["stop"] = [late_piece(free["choices"][index]["text"]) for index in (1, 2)]
    expected = whole(system.stack.url, body)
    assert [choice["finish_reason"] for choice in expected["choices"]] == ["length", "stop", "stop", "length"]

    decode = system.stack.workers("decode")
    wait_until(lambda: num_ready(system) == len(decode), "all decode workers are used", PATIENCE_S)
    before, victim = num_takeovers(system), decode[0]

    with ThreadPoolExecutor(1) as pool:
        for salt in range(TRIES):
            asking = pool.submit(ask, system.stack.url, {**body, "cache_salt": f"{ask.__name__} {num_prompts} {salt}"})
            if is_shared(decode, asking):
                break
            check_same(asking.result(), expected)
        victim.kill()
        got = asking.result(PATIENCE_S)
    moved = num_takeovers(system) - before
    system.stack.restart(victim)
    assert 1 <= moved < 4
    check_same(got, expected)

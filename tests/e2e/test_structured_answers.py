"""Answers that must match a grammar, through both pools: whoever computes them, and however often they move."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from common.model_files.resolve import resolve_model
from common.model_files.tokenizer import Tokenizer

from .asking import MODEL, PROBE_TIMEOUT_S, wait_until
from .test_failures import ALL_REMOTE, PATIENCE_S, SLOW_PREFILL, is_busy, num_moves, run_with, states
from .test_handover import handovers

pytestmark = pytest.mark.e2e

LONG = {"regex": "([a-f]{2} [0-9]{3};){114}"}
"""798 characters: two short of what `run_with` lets a request have."""


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
    params = {"structured_outputs": LONG, "temperature": 1.0, "seed": 3}
    expected = system.generate(prompts, max_tokens=800, **params)
    for tokens in expected:
        assert re.fullmatch(LONG["regex"], bytes(token for token in tokens if token < 256).decode())
    assert disturb(prompts, **params) == expected


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_answer_whose_worker_dies_keeps_to_its_grammar(system_of: Any, random_prompts: Any, role: str) -> None:
    """Its first tokens come with it: the grammar's place is found again by them."""
    system = system_of(2, 2, router_flags=ALL_REMOTE, prefill_flags=SLOW_PREFILL)
    victim = system.stack.workers(role)[0]

    def disturb(prompts: list[list[int]], **params: Any) -> list[list[int]]:
        return run_with(system, prompts, victim, victim.kill, cache_salt=role, **params)

    generate_long(system, random_prompts, disturb)
    system.stack.restart(victim)


def test_an_answer_that_is_handed_over_keeps_to_its_grammar(system_of: Any, random_prompts: Any) -> None:
    system = system_of(2, 2, router_flags=ALL_REMOTE, prefill_flags=SLOW_PREFILL)
    wait_until(lambda: states(system).count("ready") == 4, "all workers are used")
    victim = system.stack.workers("decode")[0]

    def disturb(prompts: list[list[int]], **params: Any) -> list[list[int]]:
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(system.generate, prompts, max_tokens=800, cache_salt="handed over", **params)
            wait_until(lambda: is_busy(system, victim), f"{victim.name} is busy")
            victim.terminate()
            return coming.result(PATIENCE_S)

    before = handovers(system)
    generate_long(system, random_prompts, disturb)
    assert handovers(system) > before
    victim.wait(time.monotonic() + PATIENCE_S)
    system.stack.restart(victim)


@pytest.mark.parametrize("grammar", [{"regex": "("}, {"grammar": "start: nothing"}, {"json": {"type": "no"}}])
def test_what_cannot_be_matched_is_the_clients_error(http: httpx.Client, grammar: dict[str, Any]) -> None:
    reply = http.post("/v1/completions", json={"model": MODEL, "prompt": "a", "structured_outputs": grammar})
    assert reply.status_code == 400 and reply.json()["error"]["param"].startswith("structured_outputs.")


ENDLESS = {"json": {"type": "integer", "multipleOf": 99999989}}
FORCED = [{"regex": f"(a{{4000}}){{{500 + i}}}"} for i in range(12)]
TRIVIAL = {"json": {"type": "boolean"}}
LONG_S = 300.0
"""Grammars at their bounds, and streams beside them, on a busy machine."""


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
            body = {"model": MODEL, "prompt": "Say.", "max_tokens": 20, "structured_outputs": form}
            return client.post("/v1/completions", json=body)

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


# ---------------------------------------------------------------- a real model

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASK: Any = [{"role": "user", "content": "What is the weather in Paris? Use the function."}]


@pytest.fixture
def sdk(system_of: Any) -> Iterator[openai.OpenAI]:
    system = system_of(model="smollm2-135m", router_flags=ALL_REMOTE)
    with openai.OpenAI(base_url=f"{system.stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_sdk_calls_a_function_and_hands_back_its_result(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "smollm2-135m", "tools": [TOOL], "temperature": 0, "max_tokens": 120}
    answer = sdk.chat.completions.create(messages=ASK, tool_choice="required", parallel_tool_calls=False, **asked)
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments).keys() <= {"city", "unit"}
    streamed = ""
    for chunk in sdk.chat.completions.create(
        messages=ASK, tool_choice="required", parallel_tool_calls=False, stream=True, **asked
    ):
        for part in chunk.choices[0].delta.tool_calls or ():
            streamed += (part.function and part.function.arguments) or ""
    assert streamed == call.function.arguments
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "18 °C and sunny"}
    said = answer.choices[0].message.model_dump(exclude_none=True)
    after = sdk.chat.completions.create(messages=[*ASK, said, result], **{**asked, "max_tokens": 30})
    assert after.choices[0].message.content or after.choices[0].message.tool_calls


def test_arguments_have_no_members_that_are_not_named(sdk: openai.OpenAI) -> None:
    """A small model invents some where it may, at this temperature in most answers."""
    tool: Any = json.loads(json.dumps(TOOL))
    del tool["function"]["parameters"]["additionalProperties"]
    asked: Any = {
        "model": "smollm2-135m",
        "messages": ASK,
        "tools": [tool],
        "tool_choice": "required",
        "max_tokens": 60,
    }
    answer = sdk.chat.completions.create(n=16, temperature=1.3, seed=1, parallel_tool_calls=False, **asked)
    called = [call for choice in answer.choices for call in choice.message.tool_calls or ()]
    assert len(called) == 16 and {choice.finish_reason for choice in answer.choices} == {"tool_calls"}
    for call in called:
        assert call.type == "function" and json.loads(call.function.arguments).keys() <= {"city", "unit"}


def test_a_call_is_streamed_part_by_part_and_cut_off_anywhere(sdk: openai.OpenAI) -> None:
    """With the tokens of a real model, of which several make up a mark."""
    asked: Any = {"model": "smollm2-135m", "messages": ASK, "tools": [TOOL], "temperature": 0, "stream": True}
    for num_tokens in range(1, 36):
        required = "required" if num_tokens % 2 else "auto"
        chunks = sdk.chat.completions.create(max_tokens=num_tokens, tool_choice=required, **asked)
        _, *choices = [chunk.choices[0] for chunk in chunks]
        for choice in choices:
            assert choice.finish_reason or choice.delta.content or choice.delta.tool_calls
            assert len(choice.delta.tool_calls or ()) <= 1
            assert not (choice.delta.content and (required == "required" or "<tool" in choice.delta.content))
        assert choices[-1].finish_reason in ("length", "tool_calls")


def test_the_sdk_parses_an_answer_of_a_schema(sdk: openai.OpenAI) -> None:
    wanted = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
              "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
    answer = sdk.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": "Bob is 42 years old. Give his name and age as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": wanted, "strict": True}},
        temperature=0,
    )
    assert json.loads(answer.choices[0].message.content or "") == {"name": "Bob", "age": 42}
    text = answer.choices[0].message.content or ""
    assert len(Tokenizer.from_file(resolve_model("smollm2-135m").tokenizer).encode(text)) < 60, "it wanders"

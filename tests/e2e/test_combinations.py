"""What clients may ask for, combined at random: the answer does not depend on where and how often it is computed."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from common.wire import LOGPROB_FLOOR

from ..rig import IS_OWN_ENGINE
from .test_thoughts import changed
from .test_token_rules import ALL_REMOTE, ALLOWED

pytestmark = pytest.mark.e2e

Answer = tuple[int, Any]
NUM, AT_ONCE, ATOL = 48, 10, 2e-3
PATIENCE = 5
"""Times that a pool of few blocks is asked all again until it has had to preempt."""
STARTS = (0, 1000)
LOGPROBS = ("--max-logprobs", "-1")
TIGHT = ("--num-blocks", "48", "--watermark", "0")
MIDDLE = {"<|pad|>": "[SUFFIX]", "<|eos|>": "[PREFIX]"}
"""Tokens around a text to fill in, as Codestral has them, in place of others that no answer has."""
OWN = ("id", "created", "usage", "system_fingerprint")
"""What answers have of their own, or by the cache."""
PARAMETERS = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {**PARAMETERS, "additionalProperties": False}}}
Shares = tuple[tuple[float, tuple[dict[str, Any], ...]], ...]
IN_BEAMS: Shares = (
    (0.3, ({"ignore_eos": True}, {"min_tokens": 1})),
    (0.5, ({"allowed_token_ids": ALLOWED}, {"bad_words": ["ab", "c", "d e"]})),
    (0.3, ({"stop": ["a", "zz"]}, {"stop": [f"x{i}" for i in range(40)]}, {"stop_token_ids": [101, 102]})),
    (0.2, ({"include_stop_str_in_output": True}, {"skip_special_tokens": False})),
    (0.4, ({"return_token_ids": True}, {"return_tokens_as_token_ids": True})),
    (0.2, ({"truncate_prompt_tokens": 5}, {"truncate_prompt_tokens": 20, "truncation_side": "right"})),
    (0.3, ({"prompt_logprobs": 0}, {"prompt_logprobs": 2}, {"prompt_logprobs": -1})),
)
SOMETIMES: Shares = (
    *IN_BEAMS,
    (0.3, ({"n": 2}, {"n": 3})),
    (0.2, ({"top_k": 1}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1})),
    (0.3, ({"presence_penalty": 0.7}, {"frequency_penalty": -0.4}, {"repetition_penalty": 1.3})),
    (0.15, ({"logit_bias": {"97": 3, "98": -100}},)),
)
IN_CHATS: Shares = (
    (0.4, ({"logprobs": True}, {"logprobs": True, "top_logprobs": 3}, {"logprobs": True, "top_logprobs": -1})),
    (0.3, ({"echo": True},)),
)
IN_SAMPLED_CHATS: Shares = (
    (0.1, ({"logprobs": True, "top_logprobs": 3, "logprob_token_ids": [65, 97]},)),
    (0.4, ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "required"}, {"tools": []}, {"response_format": FORM})),
)
IN_COMPLETIONS: Shares = (
    (0.5, ({"logprobs": 0}, {"logprobs": 3}, {"logprobs": -1}, {"echo": True}, {"echo": True, "logprobs": 2})),
    (0.2, ({"suffix": "the lazy dog."},)),
)
IN_SAMPLED_COMPLETIONS: Shares = (
    (0.1, ({"logprobs": 1, "logprob_token_ids": [65, 97]},)),
    (0.2, ({"best_of": 4}, {"structured_outputs": {"regex": "[a-h]{3,30}"}})),
)


def request_of(number: int) -> tuple[str, dict[str, Any]]:
    """A path and a body, always the same for a number."""
    source = random.Random(number)
    is_chat, is_search = source.random() < 0.45, source.random() < 0.2
    body: dict[str, Any] = {"max_tokens": source.choice((1, 2, 9) if is_search else (1, 2, 17, 40, 90))}
    if is_search:
        body |= {"use_beam_search": True, "temperature": 0, "n": source.choice((1, 3))}
        body["length_penalty"] = source.choice((1.0, 0.0, -1.0))
    else:
        drawn = {"temperature": 1.0, "seed": number} if IS_OWN_ENGINE else {"temperature": 0}
        body |= source.choice(({"temperature": 0}, drawn))
    if is_chat:
        body["messages"] = [{"role": "user", "content": "tell me " * source.choice((1, 5)) + str(number % 7)}]
        if source.random() < 0.4:
            body["messages"].append({"role": "assistant", "content": "Well, "})
            body |= {"add_generation_prompt": False, "continue_final_message": True}
    else:
        ids = [source.randrange(32, 120) for _ in range(source.choice((3, 47, 130)))]
        body["prompt"] = source.choice(("The quick brown fox " * 3, ids, ["one", "two two two"]))
    for share, choices in shares_of(is_chat=is_chat, is_search=is_search):
        if source.random() < share:
            body |= source.choice(choices)
    if not body.keys() & {"best_of", "prompt_logprobs"} and source.random() < 0.4:
        body["stream"] = True
    return f"/v1/{'chat/' if is_chat else ''}completions", body


def shares_of(*, is_chat: bool, is_search: bool) -> Shares:
    """What a request may have, each with its chance."""
    own = IN_CHATS if is_chat else IN_COMPLETIONS
    if is_search:
        return IN_BEAMS + own
    return SOMETIMES + own + (IN_SAMPLED_CHATS if is_chat else IN_SAMPLED_COMPLETIONS)


def ask(client: httpx.Client, number: int) -> Answer:
    path, body = request_of(number)
    while (reply := client.post(path, json=body)).status_code in (429, 503):
        time.sleep(0.2)
    if not body.get("stream") or reply.status_code != 200:
        return reply.status_code, plain(reply.json())
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]", lines[-1:]
    joined: dict[int, list[list[Any]]] = {}
    for choice in (choice for line in lines for choice in json.loads(line)["choices"]):
        joined.setdefault(choice.pop("index"), []).append(list(leaves(plain(choice))))
    return 200, [[index, texts_of(joined[index])] for index in sorted(joined)]


def plain(value: Any) -> Any:
    """An answer without what differs between any two."""
    if isinstance(value, dict):
        if not IS_OWN_ENGINE:  # the order in which vLLM finds tokens that a format forbids is not defined
            if value.get("logprob") == LOGPROB_FLOOR:
                return {}
            value = {key: inner for key, inner in value.items() if inner != LOGPROB_FLOOR}
        return {key: plain(inner) for key, inner in value.items() if key not in OWN}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def leaves(value: Any, path: str = "") -> Any:
    """(path, value) of every text and number in an event, in order."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}/{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, path)
    elif value is not None and not path.endswith(("text_offset", "role", "type", "index")):
        yield [path, value]


def texts_of(events: list[list[Any]]) -> dict[str, Any]:
    """What the events of a choice say together: how tokens are divided among them depends on the load."""
    said: dict[str, list[Any]] = {}
    for path, value in (leaf for event in events for leaf in event):
        said.setdefault(path, []).append(value)
    is_text = {path: path.rpartition("/")[2] in ("text", "content", "arguments", "reasoning") for path in said}
    return {
        path: "".join(values) if is_text[path] and "logprobs" not in path else values for path, values in said.items()
    }


def is_close(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=ATOL)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_close(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_close, one, other))
    return bool(one == other)


def answers(
    system: Any, numbers: range, meanwhile: Callable[[list[Future[Answer]]], None] | None = None
) -> list[Answer]:
    with (
        httpx.Client(base_url=system.stack.url, timeout=240, trust_env=False) as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        asked = [pool.submit(ask, client, number) for number in numbers]
        if meanwhile is not None:
            meanwhile(asked)
        return [one.result() for one in asked]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model, which fills in the middle."""
    return str(changed(tmp_path_factory.mktemp("fills") / "fills", MIDDLE))


def test_the_combinations_have_what_each_stands_for() -> None:
    bodies = [request_of(number)[1] for first in STARTS for number in range(first, first + NUM)]
    searches = [body for body in bodies if "use_beam_search" in body]
    for field in ("suffix", "echo", "logprobs", "prompt_logprobs", "bad_words", "stop"):
        assert any(field in body for body in searches) and any(field in body for body in bodies if body not in searches)
    assert {body.get("logprobs") for body in bodies} & {body.get("prompt_logprobs") for body in bodies} >= {-1}
    assert any(body.get("echo") for body in bodies if "messages" in body)


@pytest.mark.slow
@pytest.mark.parametrize("first", STARTS)
def test_they_are_the_same_after_transfers_preemptions_and_takeovers(system_of: Any, model: str, first: int) -> None:
    numbers = range(first, first + NUM)
    alone = answers(system_of(0, 1, model=model, router_flags=LOGPROBS), numbers)
    assert sum(status == 200 for status, _ in alone) > 0.8 * NUM and {status for status, _ in alone} <= {200, 400}

    def check(found: list[Answer]) -> None:
        differing = [
            n for n, one, other in zip(numbers, alone, found, strict=True) if not is_close(list(one), list(other))
        ]
        assert differing == [], [(request_of(n), alone[n - first], found[n - first]) for n in differing[:2]]

    remote = (*LOGPROBS, *ALL_REMOTE)
    check(answers(system_of(model=model, router_flags=remote), numbers))
    tight = system_of(model=model, router_flags=remote, decode_flags=TIGHT)
    preempted = 0.0
    for _ in range(PATIENCE):  # how many requests meet depends on the load
        check(answers(tight, numbers))
        if preempted := tight.metric("vllm:num_preemptions", "decode"):
            break
    assert preempted > 0
    system = system_of(2, 2, model=model, router_flags=remote)
    victims = [system.stack.workers(role)[0] for role in ("decode", "prefill")]

    def kill(asked: list[Future[Answer]]) -> None:
        for third, victim in enumerate(victims, 1):
            while sum(one.done() for one in asked) < third * NUM // 3:
                time.sleep(0.02)
            victim.kill()

    check(answers(system, numbers, kill))
    for victim in victims:
        system.stack.restart(victim)
    system.wait_for_workers()

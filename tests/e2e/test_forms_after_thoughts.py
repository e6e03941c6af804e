"""Schemas, grammars and demanded calls after the thought of a random model, in all APIs and wherever they are made."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.model_files.tiny import BOS, IM_END, PAD

from ..rig import wait_until
from .test_failures import PATIENCE_S, is_busy
from .test_handover import handovers
from .test_thoughts import changed
from .test_token_rules import ALL_REMOTE

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(540)]

Check = Callable[[str], bool]
WORD = {"type": "string", "pattern": "^[a-z]{1,6}$"}
NAMES = ("weather", "climate")


def valid(schema: dict[str, Any]) -> Check:
    from jsonschema import Draft202012Validator  # seconds to import

    def check(text: str) -> bool:
        try:
            return Draft202012Validator(schema).is_valid(json.loads(text))
        except ValueError:
            return False

    return check


def object_of(**members: Any) -> dict[str, Any]:
    return {"type": "object", "properties": members, "required": [*members], "additionalProperties": False}


SCHEMAS: list[dict[str, Any]] = [
    object_of(**{f"m{i}": member for i, member in enumerate(members)})
    for members in itertools.product(
        (WORD, {"type": "integer", "minimum": 0, "maximum": 99}, {"enum": ["a", "</think>", 3]}),
        (
            {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
            {"anyOf": [WORD, {"type": "null"}]},
            {"const": {"<think>": 1}},
        ),
        (object_of(a=WORD), {"type": "string", "maxLength": 8}),
    )
]
REGEXES = (
    "[a-z]{3,9}",
    " ?[A-F]{2}[0-9]{1,4}",
    "(?:<[a-z]>){1,4}",
    r"\d{1,3}-\d{1,3}",
    "[^a]{1,12}",
    r"\n\n[x-z]{1,3}",
    r"\s{1,2}[0-9]",
    "<thin[a-z]{1,3}>",
    "[ -~]{0,9}",
)
CHOICES = (["yes", "no"], ["<b>", "</b>", "<thin>"], ["a", "ab", "abc"], ["é", "日本", " x"])
GRAMMARS = (
    ('start: "(" start ")" | DIGITS\nDIGITS: /[0-9]{1,3}/\n', r"\(*[0-9]{1,3}\)*"),
    ('start: "a" "b" | "c"\n%ignore " "\n', r" *(?:a *b|c) *"),
    ('root ::= "x" [0-9] ("," [0-9])? "y"\n', "x[0-9](?:,[0-9])?y"),
    ('start: WORD ("," WORD)?\nWORD: /[a-z]{1,4}/\n', "[a-z]{1,4}(?:,[a-z]{1,4})?"),
)
ARGUMENTS = object_of(unit={"enum": ["celsius", "kelvin"]}, place={"type": "string", "minLength": 1, "maxLength": 9})
CALLS = [("any", False), *itertools.product(NAMES, (True, False))]
"""Choices of a tool, and whether parallel calls are allowed, which has no effect on a named one."""
FORMS: list[tuple[dict[str, Any], Check | None]] = [
    *(({"structured_outputs": {"json": schema}}, valid(schema)) for schema in SCHEMAS),
    *(({"structured_outputs": {"regex": regex}}, lambda text, r=regex: bool(re.fullmatch(r, text)))
      for regex in REGEXES),
    *(({"structured_outputs": {"choice": choice}}, choice.__contains__) for choice in CHOICES),
    *(({"structured_outputs": {"grammar": grammar}}, lambda text, r=regex: bool(re.fullmatch(r, text)))
      for grammar, regex in GRAMMARS),
    *(({"choice": choice, "several": several}, None) for choice, several in CALLS),
]  # fmt: skip
"""Forms of an answer, and their checks; None for demanded calls."""
NUM_ANSWERS = 2000


def made(folder: Path, *, opens: bool, special: bool) -> Path:
    """A model whose template opens the thought, or names the marks. These are bytes or special tokens."""
    template = "assistant\\n<think>\\n' }}{# </think> #}" if opens else "assistant\\n' }}{# <think> </think> #}"
    marks = {"<|pad|>": "<think>", "<|bos|>": "</think>"} if special else {}
    return changed(folder / f"opens-{opens}-special-{special}", marks | {"assistant\\n' }}": template})


MODELS = [(opens, special) for opens in (True, False) for special in (True, False)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, bool], Path]:
    folder = tmp_path_factory.mktemp("thinking")
    return {(opens, special): made(folder, opens=opens, special=special) for opens, special in MODELS}


def body_of(api: str, form: dict[str, Any], seed: int, *, opens: bool, special: bool) -> dict[str, Any]:
    """A request whose thought has a budget. A model that opens its thought is made to do so, mostly."""
    hi = f"why {seed}? " * (1 + seed % 9)
    body: dict[str, Any] = {"temperature": 0.8 + seed % 3 / 10, "thinking_token_budget": (0, 3, 17, 40)[seed % 4]}
    body |= {"input": hi} if api == "responses" else {"messages": [{"role": "user", "content": hi}]}
    body |= {"max_output_tokens" if api == "responses" else "max_tokens": 700, "seed": seed}
    if not opens and seed % 5:
        body["logit_bias"] = {str(PAD if special else ord("<")): 100 if special else 20}
    if api == "messages":
        body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    if "choice" not in form:
        return body | form
    named = form["choice"] if form["choice"] in NAMES else ""
    if api == "messages":
        body["tools"] = [{"name": name, "input_schema": ARGUMENTS} for name in NAMES]
        choice = {"type": "tool", "name": named} if named else {"type": "any"}
        return body | {"tool_choice": choice | {"disable_parallel_tool_use": not form["several"]}}
    functions = [{"name": name, "parameters": ARGUMENTS} for name in NAMES]
    body["parallel_tool_calls"] = form["several"]
    if api == "chat":
        body["tools"] = [{"type": "function", "function": function} for function in functions]
        return body | {"tool_choice": {"type": "function", "function": {"name": named}} if named else "required"}
    body["tools"] = [{"type": "function", **function} for function in functions]
    return body | {"tool_choice": {"type": "function", "name": named} if named else "required"}


PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
Answer = tuple[str, str, list[tuple[str, str]], bool]
"""Thought, text, calls, and whether the answer ended by itself."""


def whole(api: str, body: dict[str, Any]) -> Answer:
    if api == "chat":
        (choice,) = body["choices"]
        message = choice["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        thought = message.get("reasoning_content") or ""
        return thought, message["content"] or "", calls, choice["finish_reason"] in ("stop", "tool_calls")
    if api == "responses":
        items = body["output"]
        calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
        texts = {kind: "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])
                 for kind in ("reasoning", "message")}  # fmt: skip
        return texts["reasoning"], texts["message"], calls, body["status"] == "completed"
    blocks = body["content"]
    thought = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [(block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"]
    return thought, text, calls, body["stop_reason"] in ("end_turn", "tool_use")


def streamed(api: str, events: list[dict[str, Any]]) -> Answer:
    """Assemble a stream into the body of a whole answer, and read that."""
    if api == "responses":
        deltas = {kind: "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")
                  for kind in ("reasoning_text", "output_text", "function_call_arguments")}  # fmt: skip
        answer = whole(api, events[-1]["response"])
        assert answer[:2] == (deltas["reasoning_text"], deltas["output_text"])
        assert "".join(arguments for _, arguments in answer[2]) == deltas["function_call_arguments"]
        return answer
    if api == "chat":
        choices = [choice for event in events for choice in event["choices"]]
        message = {name: "".join(choice["delta"].get(name) or "" for choice in choices)
                   for name in ("content", "reasoning_content")}  # fmt: skip
        functions: dict[int, dict[str, str]] = {}
        for part in (part for choice in choices for part in choice["delta"].get("tool_calls", ())):
            function = functions.setdefault(part["index"], {"name": part["function"].get("name", ""), "arguments": ""})
            function["arguments"] += part["function"]["arguments"]
        calls = [{"function": function} for function in functions.values()]
        reason = choices[-1]["finish_reason"]
        return whole(api, {"choices": [{"message": {**message, "tool_calls": calls}, "finish_reason": reason}]})
    blocks: list[dict[str, Any]] = []
    stop_reason = ""
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            for name, field in (("text", "text"), ("thinking", "thinking"), ("json", "partial_json")):
                blocks[-1][name] = blocks[-1].get(name, "") + event["delta"].get(field, "")
        elif event["type"] == "message_delta":
            stop_reason = event["delta"]["stop_reason"]
    for block in blocks:
        block["input"] = json.loads(block["json"] or "{}")
    return whole(api, {"content": blocks, "stop_reason": stop_reason})


def ask(client: httpx.Client, api: str, body: dict[str, Any]) -> tuple[Answer, Answer]:
    """The answer of a request, whole and streamed."""
    reply = client.post(PATHS[api], json=body)
    assert reply.status_code == 200, reply.text
    stream = client.post(PATHS[api], json=body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in stream.text.splitlines() if line.startswith("data: ")]
    return whole(api, reply.json()), streamed(api, [json.loads(line) for line in lines if line != "[DONE]"])


def is_in_form(number: int, answer: Answer) -> bool:
    form, check = FORMS[number]
    thought, text, calls, ended = answer
    if not ended or "</think>" in thought:
        return False
    if check is not None:
        return not calls and check(text)
    named = [form["choice"]] if form["choice"] in NAMES else NAMES
    fits = valid(ARGUMENTS)
    return not text.strip() and len(calls) == 1 and all(name in named and fits(given) for name, given in calls)


@pytest.mark.parametrize(("opens", "special"), MODELS)
def test_forms_follow_thoughts(
    system_of: Any, models: dict[tuple[bool, bool], Path], opens: bool, special: bool
) -> None:
    assert len(FORMS) == 40
    system = system_of(1, 1, model=str(models[opens, special]), router_flags=ALL_REMOTE)
    seeds = range(NUM_ANSWERS // len(MODELS))
    with httpx.Client(base_url=system.stack.url, timeout=300, trust_env=False) as client:

        def run(seed: int) -> tuple[bool, str]:
            number, api = seed % len(FORMS), ("chat", "responses", "messages")[seed % 3]
            body = body_of(api, FORMS[number][0], seed, opens=opens, special=special)
            once, again = ask(client, api, body)
            problem = "" if is_in_form(number, once) and once == again else f"{seed} {api} {body} {once} {again}"
            return bool(once[0]), problem

        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(run, seeds))
    problems = [problem for _, problem in found if problem]
    assert not problems, (len(problems), problems[:3])
    assert sum(has_thought for has_thought, _ in found) > len(found) // 2


# ---------------------------------------------------------------- wherever they are made

LONG = {"structured_outputs": {"regex": "([a-f]{2} [0-9]{3};){20}"}}
END = {True: [BOS], False: list(b"</think>")}


def tokens_of(system: Any, *, special: bool, budget: int, times: int = 1, salt: str = "") -> list[list[list[int]]]:
    """Tokens of the choices of each answer: a thought of `budget` tokens, and a long form."""

    def one(seed: int) -> list[list[int]]:
        body = {
            "messages": [{"role": "user", "content": "why? " * (30 + seed)}],
            "max_tokens": budget + 300,
            "n": 2,
            **LONG,
        }
        body |= {"thinking_token_budget": budget, "return_token_ids": True, "temperature": 1.0, "seed": seed}
        body |= {"cache_salt": salt} if salt else {}
        reply = httpx.post(f"{system.stack.url}/v1/chat/completions", json=body, timeout=240, trust_env=False)
        assert reply.status_code == 200, reply.text
        choices = reply.json()["choices"]
        assert all(re.fullmatch(LONG["structured_outputs"]["regex"], one["message"]["content"]) for one in choices)
        return [choice["token_ids"] for choice in choices]

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, [*range(4)] * times))


@pytest.mark.parametrize("special", [True, False])
def test_thought_and_form_are_the_same_wherever_they_are_made(
    system_of: Any, models: dict[tuple[bool, bool], Path], special: bool
) -> None:
    model = str(models[True, special])
    plain = system_of(0, 1, model=model, decode_flags=("--max-draft-tokens", "0"))
    alone = tokens_of(plain, special=special, budget=50)
    for tokens in (tokens for choices in alone for tokens in choices):
        place = next(i for i in range(len(tokens)) if tokens[i : i + len(END[special])] == END[special])
        assert place in range(50, 54) and tokens[-1] in (257, IM_END)  # a character is not split
    assert tokens_of(system_of(model=model, router_flags=ALL_REMOTE), special=special, budget=50) == alone
    tight = ("--num-blocks", "48", "--watermark", "0")
    system = system_of(model=model, router_flags=ALL_REMOTE, decode_flags=tight)
    assert tokens_of(system, special=special, budget=50, times=3) == alone * 3
    assert system.metric("vllm:num_preemptions", "decode") > 0


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_another_worker_continues_a_thought(system_of: Any, models: dict[tuple[bool, bool], Path], end: str) -> None:
    """After a takeover, and after a hand-over, in the middle of the thought."""
    model = str(models[True, False])
    alone = tokens_of(system_of(0, 1, model=model), special=False, budget=600)
    system = system_of(2, 2, model=model, router_flags=ALL_REMOTE)
    victim, before = system.stack.workers("decode")[0], handovers(system)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(tokens_of, system, special=False, budget=600, times=4, salt=end)
        wait_until(lambda: is_busy(system, victim), f"{victim.name} is busy")
        getattr(victim, end)()
        assert asking.result(PATIENCE_S) == alone * 4
    assert end == "kill" or handovers(system) > before
    system.stack.restart(victim)

"""Every field that the official clients can send is served, without effect on the answer, or refused.

The tables under `known` name each of them. constraints.txt says for which versions; a field that a newer one brings
fails here until its place in the tables is decided.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from router.api.anthropic.fields import CountTokensRequest, MessagesRequest
from router.api.responses.fields import ResponsesRequest
from router.request.extensions import Fields as Request
from router.request.fields import ChatRequest, CompletionRequest
from router.stored.records import StoredResponse

from .known import extensions
from .known.chat import CHAT, COMPLETIONS
from .known.messages import ANTHROPIC, COUNT_TOKENS
from .known.outcome import Fields, Outcome, Table
from .known.responses import RESPONSES, STORED
from .known.sdk import paths

WRONG = [[5.5]]
"""A value that no field accepts."""


@pytest.fixture
def response_store() -> str:
    return "memory"


@dataclass(frozen=True)
class Api:
    path: str
    types: tuple[Any, ...]
    model: type[Request]
    table: Table
    extensions: Table
    base: Fields


TURN = {"messages": [{"role": "user", "content": "hi"}]}
APIS = {
    "chat": Api(
        "/v1/chat/completions",
        (chat_create_params.CompletionCreateParamsStreaming,),
        ChatRequest,
        CHAT,
        extensions.CHAT,
        {**TURN, "max_completion_tokens": 2, "seed": 1},
    ),
    "completions": Api(
        "/v1/completions",
        (completion_create_params.CompletionCreateParamsStreaming,),
        CompletionRequest,
        COMPLETIONS,
        extensions.COMPLETIONS,
        {"prompt": "hi", "max_tokens": 2, "seed": 1},
    ),
    "responses": Api(
        "/v1/responses",
        (response_create_params.ResponseCreateParamsStreaming,),
        ResponsesRequest,
        RESPONSES,
        extensions.RESPONSES,
        {"input": "hi", "max_output_tokens": 2, "seed": 1},
    ),
    "messages": Api(
        "/v1/messages",
        (message_create_params.MessageCreateParamsStreaming, beta_create_params.MessageCreateParamsStreaming),
        MessagesRequest,
        ANTHROPIC,
        extensions.MESSAGES,
        {**TURN, "max_tokens": 2, "seed": 1},
    ),
    "count_tokens": Api(
        "/v1/messages/count_tokens",
        (message_count_tokens_params.MessageCountTokensParams, beta_count_tokens_params.MessageCountTokensParams),
        CountTokensRequest,
        COUNT_TOKENS,
        extensions.COUNT_TOKENS,
        TURN,
    ),
}


@pytest.fixture
async def running(start: Any) -> Any:
    """An application with the stored response that a table names, and room for all that run in the background."""
    running = await start(max_background=1000)
    record = StoredResponse(STORED, "", "completed", b"[]", b"{}")
    running.app.state.responses.store.keep(record)
    return running


each_api = pytest.mark.parametrize("api", APIS.values(), ids=APIS)


def known(api: Api, *kinds: str) -> Iterator[tuple[str, Outcome]]:
    both = (*api.table.items(), *api.extensions.items())
    return ((path, outcome) for path, outcome in both if outcome.kind in kinds)


def named(error: Any) -> str:
    """The field that an error of either shape names, without places in lists."""
    text = error["param"] if "param" in error else re.match(r"[a-z_.\[\]0-9]*", error["message"])[0]
    return re.sub(r"\[\d+\]", "", text or "")


@each_api
def test_every_field_of_the_official_clients_is_known(api: Api) -> None:
    def is_served(path: str) -> bool:
        return path in api.table and api.table[path].kind == "served"

    found = {path for root in api.types for path in paths(root, is_served)}
    assert sorted(found - api.table.keys()) == []
    assert sorted(api.table.keys() - found) == []


@each_api
def test_every_field_of_ours_is_known(api: Api) -> None:
    assert sorted(api.model.model_fields.keys() - api.table.keys() - api.extensions.keys()) == []


@pytest.mark.slow
@each_api
async def test_what_is_served_and_what_has_no_effect_is_no_error(running: Any, api: Api) -> None:
    wrong = []
    for path, outcome in known(api, "served", "no effect"):
        reply = await running.http.post(api.path, json=api.base | outcome.fields)
        if reply.status_code != 200:
            wrong.append((path, reply.text))
    assert wrong == []


@pytest.mark.slow_cases("chat", "responses")
@each_api
async def test_what_is_served_is_read(running: Any, api: Api) -> None:
    """The server ignores a field that takes every value."""
    wrong = []
    for path, outcome in known(api, "served"):
        name = re.split(r"[.\[]", path)[-1]
        if path.endswith("]") or "=" in path:
            continue
        reply = await running.http.post(api.path, json=replaced(api.base | outcome.fields, name))
        if reply.status_code != 400:
            wrong.append((path, reply.text))
    assert wrong == []


@each_api
async def test_what_has_no_effect_leaves_the_request_as_it_is(running: Any, api: Api) -> None:
    if api.path.endswith("count_tokens"):
        return
    await running.http.post(api.path, json=api.base)
    (plain,) = running.engine.requests
    for path, outcome in known(api, "no effect"):
        if outcome.fields.keys() == {path}:
            await running.http.post(api.path, json=api.base | outcome.fields)
            request = running.engine.requests[-1]
            assert (request.prompt_token_ids, request.params) == (plain.prompt_token_ids, plain.params), path


@pytest.mark.slow_cases("responses", "messages")
@each_api
async def test_what_is_refused_is_named(running: Any, api: Api) -> None:
    wrong = []
    for path, outcome in known(api, "refused"):
        reply = await running.http.post(api.path, json=api.base | outcome.fields)
        field = re.sub(r"\[\w*\]|=.*", "", path)
        error = reply.json().get("error", {"param": ""})
        if reply.status_code != 400 or not any(named(error).startswith(name) for name in (field, f"{field}.")):
            wrong.append((path, reply.text))
    assert wrong == []
    assert running.engine.requests == []


@pytest.mark.parametrize(
    ("name", "choice", "param"),
    [
        ("chat", {"type": "function", "function": {"name": "x"}}, "tool_choice.function.name"),
        ("responses", {"type": "function", "name": "x"}, "tool_choice.name"),
        ("messages", {"type": "tool", "name": "x"}, "tool_choice.name"),
        ("count_tokens", {"type": "tool", "name": "x"}, "tool_choice.name"),
    ],
)
async def test_a_tool_that_is_not_there_is_named_as_the_api_calls_it(
    running: Any, name: str, choice: Fields, param: str
) -> None:
    api = APIS[name]
    fields = api.base | api.table["tools"].fields | {"tool_choice": choice}
    assert named((await running.http.post(api.path, json=fields)).json()["error"]) == param


def replaced(value: Any, name: str) -> Any:
    """`value` with a wrong value for each member of the name."""
    if isinstance(value, list):
        return [replaced(item, name) for item in value]
    if isinstance(value, dict):
        return {key: WRONG if key == name else replaced(inner, name) for key, inner in value.items()}
    return value


@pytest.mark.parametrize("api", ["responses", "messages"])
@pytest.mark.parametrize("value", [[], {}, "", False, None], ids=repr)
async def test_a_default_in_any_spelling_is_no_error_in_the_newer_apis(running: Any, api: str, value: Any) -> None:
    """Fields that only the older APIs serve with types of their own."""
    response = await running.http.post(APIS[api].path, json=APIS[api].base | {"use_beam_search": value})
    assert response.status_code == 200, response.text

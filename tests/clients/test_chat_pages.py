"""Open WebUI and LibreChat are not started here: the requests that they send are, as they are written in `requests`.

Open WebUI's are after its backend/open_webui/routers/openai.py, tasks.py and middleware. Old versions sent thoughts
back in the content; new ones send none, or `reasoning_content` if the provider of the connection is llama.cpp.
LibreChat's are what its library @librechat/agents 3.9.2 sent to Diptych; titles by a function are of older versions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import Service
from .scripted_model import ANSWER, GREETING, THOUGHT, THOUGHT_AFTER

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.clients]

REQUESTS = Path(__file__).with_name("requests")
TIMEOUT_S = 60.0
FORWARDED = {"X-OpenWebUI-User-Name": "Ada", "X-OpenWebUI-User-Id": "6f1c", "X-OpenWebUI-Chat-Id": "c1"}
CALL = [("get_weather", {"city": "Paris"})]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a page shows of an answer, streamed or not."""

    text: str
    thought: str
    calls: list[tuple[str, Any]]
    num_usages: int


Ask = Callable[[str, str], Answer]


@pytest.fixture
def ask(scripted: Service) -> Ask:
    def send(page: str, request: str) -> Answer:
        reply = post(scripted, page, request)
        assert reply.status_code == 200, reply.text
        return streamed(reply.text) if "event-stream" in reply.headers["content-type"] else whole(reply.json())

    return send


def post(service: Service, page: str, request: str) -> httpx.Response:
    body = json.loads((REQUESTS / f"{page}.json").read_text())[request] | {"model": service.model}
    headers = {"Authorization": "Bearer none", **(FORWARDED if page == "open_webui" else {})}
    return httpx.post(
        f"{service.url}/v1/chat/completions", json=body, headers=headers, timeout=TIMEOUT_S, trust_env=False
    )


def whole(body: dict[str, Any]) -> Answer:
    message = body["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return Answer(
        message["content"] or "",
        message.get("reasoning_content") or "",
        [(call["name"], json.loads(call["arguments"])) for call in calls],
        1 if body["usage"] else 0,
    )


def streamed(text: str) -> Answer:
    """Joins the pieces of a stream as these pages do: calls by their index."""
    *events, done = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls") or ()):
        index, function = piece["index"], piece["function"]
        names[index] = names.get(index, "") + (function.get("name") or "")
        arguments[index] = arguments.get(index, "") + (function.get("arguments") or "")
    return Answer(
        "".join(delta.get("content") or "" for delta in deltas),
        "".join(delta.get("reasoning_content") or "" for delta in deltas),
        [(names[index], json.loads(arguments[index])) for index in sorted(names)],
        sum(1 for chunk in chunks if chunk.get("usage")),
    )


def test_open_webui_finds_the_model(scripted: Service) -> None:
    reply = httpx.get(f"{scripted.url}/v1/models", headers={"Authorization": "Bearer none"}, trust_env=False)
    (model,) = reply.json()["data"]
    assert (model["id"], model["object"]) == (scripted.model, "model") and model["owned_by"]


def test_open_webui_chats(ask: Ask) -> None:
    assert ask("open_webui", "a chat") == Answer(GREETING, "A greeting.", [], 1)
    assert ask("open_webui", "parts of a message") == Answer(GREETING, "A greeting.", [], 0)


def test_open_webui_calls_tools(ask: Ask) -> None:
    called = ask("open_webui", "a native call")
    assert (called.thought, called.calls) == (THOUGHT, CALL)
    for name in ("", " without the thought", " with the thought"):
        told = ask("open_webui", f"the call's result{name}")
        assert (told.text, told.thought) == (ANSWER, THOUGHT_AFTER), name


@pytest.mark.parametrize("request_name", ["a title", "the calls of a model that is asked in words"])
def test_open_webui_asks_for_itself(ask: Ask, request_name: str) -> None:
    assert ask("open_webui", request_name).text == GREETING


def test_an_image_is_refused_in_words_that_a_page_can_show(scripted: Service) -> None:
    reply = post(scripted, "open_webui", "an image")
    assert reply.status_code == 400 and "image" in reply.json()["error"]["message"]


def test_librechat_chats(ask: Ask) -> None:
    assert ask("librechat", "a chat") == Answer(GREETING, "A greeting.", [], 1)


def test_librechat_calls_tools(ask: Ask) -> None:
    called = ask("librechat", "an agent's call")
    assert (called.thought, called.calls) == (THOUGHT, CALL)
    told = ask("librechat", "the call's result")
    assert (told.text, told.thought) == (ANSWER, THOUGHT_AFTER)


def test_librechat_finds_titles(ask: Ask) -> None:
    assert ask("librechat", "a title").text == GREETING
    assert json.loads(ask("librechat", "a title in a schema").text).keys() == {"language", "title"}
    ((name, arguments),) = ask("librechat", "a title by a function").calls
    assert name == "extract" and arguments.keys() == {"language", "title"}

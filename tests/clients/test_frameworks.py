"""Frameworks that build on the APIs: what they get through is what the scripted model says, thoughts, calls and all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Client, Service
from .scripted_model import ANSWER, GREETING, QUESTION, RESULT, THOUGHT, THOUGHT_AFTER

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(2400)]

WEATHER = {"city": "Paris", "degrees": 18}
CALL = ["get_weather", {"city": "Paris"}]
GREETING_TOKENS = 6


def test_the_openai_sdk(scripted: Service, client_of: Callable[..., Client]) -> None:
    """Both fields of the thought, its tokens, and what the next turn's prompt gains by it, whoever writes `<think>`."""
    found = client_of("openai").ask("openai_thoughts.py", scripted.url, scripted.model)
    for way, marks in (("written", 3), ("opened", 2)):
        told = found[way]
        assert told["said"] == told["streamed"] == [GREETING, "A greeting.", "A greeting.", marks], way
        assert told["parsed"] == [WEATHER, "A greeting.", marks], way
        assert told["call"] == [CALL, THOUGHT] and told["answer"] == [ANSWER, THOUGHT_AFTER], way
        assert told["seen"] > 0 and told["response_seen"] > 0, way
        assert told["response"] == told["response_streamed"] == [["reasoning", THOUGHT], ["function_call", CALL[1]]], (
            way
        )
        assert {"response.reasoning_text.delta", "response.reasoning_text.done"} <= set(told["events"]), way
        assert told["deltas"] == THOUGHT, way
        assert told["response_answer"] == [["reasoning", THOUGHT_AFTER], ["message", ANSWER]], way
        assert told["response_parsed"] == [WEATHER, marks], way


def test_pydantic_ai(scripted: Service, client_of: Callable[..., Client]) -> None:
    found = client_of("pydantic-ai").ask("pydantic_ai_agent.py", scripted.url, scripted.model)
    parts = [["thinking", THOUGHT], ["tool-call", CALL[1]], ["thinking", THOUGHT_AFTER], ["text", ANSWER]]
    for api in ("chat", "opened", "responses", "anthropic"):
        told = found[api]
        assert told["agent"] == told["streamed"] == parts, api
        assert told["parsed"] == WEATHER and [kind for kind, _ in told["structured"]] == [kind for kind, _ in parts], (
            api
        )
        assert told["sent"] == told["sent_streamed"] == [THOUGHT], api


def test_the_ai_sdk(scripted: Service, client_of: Callable[..., Client]) -> None:
    found = client_of("ai-sdk").ask("ai_sdk.cjs", scripted.url, scripted.model)
    call = ["tool-call", CALL[1]]
    for way, marks in (("written", 3), ("opened", 2)):
        told = found[way]
        assert told["said"] == [GREETING, "A greeting.", marks], way
        steps = [[["reasoning", THOUGHT], call], [["reasoning", THOUGHT_AFTER], ["text", ANSWER]]]
        assert told["generated"] == told["streamed"] == steps, way
        assert told["object"] == [WEATHER, "A greeting."], way
        assert told["sent_back"] is True, way
    assert found["asked"] == ["Paris"] * 4


def test_langchain(scripted: Service, client_of: Callable[..., Client]) -> None:
    found = client_of("langchain").ask("langchain_chat.py", scripted.url, scripted.model)
    assert found["said"] == found["streamed"] == found["completed"] == GREETING
    assert found["tokens"] == found["streamed_tokens"] == GREETING_TOKENS
    assert found["batch"] == [GREETING] * 3
    assert found["calls"] == found["forced"] == [CALL]
    assert found["parsed"] == {"json_schema": WEATHER, "function_calling": WEATHER}
    turns = [["human", QUESTION], ["ai", ""], ["tool", f"{RESULT} and sunny"], ["ai", ANSWER]]
    assert found["agent"] == found["responses_agent"] == turns
    assert found["asked"] == ["Paris"] * 2


def test_llama_index(scripted: Service, client_of: Callable[..., Client]) -> None:
    found = client_of("llama-index").ask("llama_index_chat.py", scripted.url, scripted.model)
    assert found["said"] == found["streamed"] == found["completed"] == GREETING
    assert found["parsed"] == WEATHER
    assert (found["agent"], found["asked"]) == (ANSWER, ["Paris"])


def test_litellm(scripted: Service, client_of: Callable[..., Client]) -> None:
    client = client_of("litellm", LITELLM_LOCAL_MODEL_COST_MAP="True")
    found = client.ask("litellm_chat.py", scripted.url, scripted.model)
    call = ["get_weather", '{"city": "Paris"}']
    for provider, thought, tokens in (
        ("openai", "A greeting.", GREETING_TOKENS),
        ("hosted_vllm", "A greeting.", GREETING_TOKENS),
        ("anthropic", None, GREETING_TOKENS - 3),  # which does not think unless it is asked to
    ):
        told = found[provider]
        assert told["said"] == told["streamed"] == GREETING, provider
        assert (told["reasoning"], told["tokens"]) == (thought, tokens), provider
        assert told["call"] == told["streamed_call"] == call, provider
        assert told["answer"] == ANSWER, provider
    assert found["text"] == GREETING and found["responses"] == [GREETING]
    assert found["overflow"] == "ContextWindowExceededError"


def test_the_huggingface_hub_client(scripted: Service, client_of: Callable[..., Client]) -> None:
    client = client_of("huggingface-hub", HF_HUB_OFFLINE="0")  # which also forbids requests to a given address
    found = client.ask("huggingface_hub_chat.py", scripted.url, scripted.model)
    assert found["said"] == found["streamed"] == [GREETING, GREETING_TOKENS]
    assert found["reasoning"] == "A greeting." and found["asynchronous"] == GREETING
    assert (found["call"], found["answer"], found["asked"]) == (CALL, ANSWER, ["Paris"])
    assert set(found["parsed"]) == {"city"}
    assert [status for status, _ in found["refused"]] == [405, 404]
    assert found["refused"][1][1].endswith("Did you mean /v1/completions?")


def test_the_openai_agents_sdk(scripted: Service, client_of: Callable[..., Client]) -> None:
    """The items of a run are the thought, the call, the tool's output, the next thought and the answer."""
    found = client_of("openai-agents").ask("openai_agents_tools.py", scripted.url, scripted.model)
    items = ["reasoning_item", "tool_call_item", "tool_call_output_item", "reasoning_item", "message_output_item"]
    assert found["asked"] == ["Paris"] * 4
    for kind in ("chat", "responses"):
        for way in ("whole", "streamed"):
            run = found[f"{kind}, {way}"]
            assert (run["answer"], run["asked"], run["items"]) == (ANSWER, ["Paris"], items), (kind, way)
            assert (run["requests"], run["tokens"]) == (2, 19), (kind, way)
        assert "raw_response_event" in found[f"{kind}, streamed"]["events"]


def test_the_anthropic_sdk(scripted: Service, client_of: Callable[..., Client]) -> None:
    found = client_of("anthropic").ask("anthropic_tools.py", scripted.url, scripted.model)
    thinks: list[Any] = ["thinking", THOUGHT]
    call: list[Any] = ["tool_use", {"city": "Paris"}]
    assert found["whole"] == found["streamed"] == [thinks, call] and found["stop_reason"] == "tool_use"
    assert {"thinking", "input_json", "message_stop"} <= set(found["events"])
    assert found["plain"] == [call]
    assert found["after"] == found["told"] == found["runner"] == [["thinking", THOUGHT_AFTER], ["text", ANSWER]]
    assert found["deltas"] == ["signature_delta", "text_delta", "thinking_delta"] and all(found["signed"])
    assert found["seen"] > 0, "the prompt of the next turn lacks the thought"
    assert found["asked"] == ["Paris"]
    assert found["counted"] == found["input_tokens"] > len(QUESTION)


def test_the_ollama_client(scripted: Service, client_of: Callable[..., Client]) -> None:
    found = client_of("ollama").ask("ollama_chat.py", scripted.url, scripted.model)
    calls = [["get_weather", {"city": "Paris"}]]
    assert found["whole"] == found["streamed"] == [THOUGHT, "", calls] and found["reasons"] == ["stop", "stop"]
    assert found["plain"] == ["", "", calls] and found["after"] == [THOUGHT_AFTER, ANSWER, []]
    assert set(json.loads(found["schema"])) == {"city"}
    assert found["said"] == found["generated"] == GREETING and found["took"] > 0
    assert found["tokens"][0] == found["tokens"][2] == GREETING_TOKENS - 3 and found["tokens"][1] > 0
    assert found["models"] == found["running"] == [f"{scripted.model}:latest"] and found["family"] == "llama"
    assert found["capabilities"] == ["completion", "tools", "thinking"]
    assert found["missing"][0] == 404 and "'absent' does not exist" in found["missing"][1]
    assert found["asked"] == ["Paris"]

from __future__ import annotations

from typing import Any

import pytest

from diptych.common import __version__


async def test_health_and_ready(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(is_ready=(False, "no decode worker is ready")))
    assert (await running.http.get("/health")).json() == {"status": "ok"}
    reply = await running.http.get("/ready")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["error"]["message"] == "no decode worker is ready"
    running.engine.is_ready = (True, "")
    assert (await running.http.get("/ready")).status_code == 200


async def test_a_router_that_cannot_go_on_is_not_healthy(running: Any) -> None:
    running.app.state.service.failure = lambda: "router task 'ticks' ended"
    assert (await running.http.get("/health")).status_code == 503
    assert (await running.http.get("/ping")).status_code == 503


async def test_a_draining_router_takes_nothing_new(running: Any) -> None:
    running.app.state.service.draining = True
    assert (await running.http.get("/ready")).status_code == 503
    reply = await running.completion()
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert (await running.http.get("/health")).status_code == 200


async def test_models(start: Any) -> None:
    running = await start(served_model_name="mine")
    listed = (await running.http.get("/v1/models")).json()
    assert [(model["id"], model["max_model_len"]) for model in listed["data"]] == [("mine", 4096)]
    assert (await running.http.get("/v1/models/mine")).json() == listed["data"][0]
    assert (await running.http.get("/v1/models/tiny-random")).status_code == 200
    reply = await running.http.get("/v1/models/org/other")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


async def test_the_workers_may_take_less_than_the_model(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(max_model_len=128))
    assert (await running.http.get("/v1/models")).json()["data"][0]["max_model_len"] == 128


async def test_a_text_into_tokens_and_back(running: Any) -> None:
    reply = await running.http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})
    body = reply.json()
    assert (body["tokens"], body["count"], body["max_model_len"]) == ([104, 0xC3, 0xA9], 3, 4096)
    assert len(body["token_strs"]) == 3
    reply = await running.http.post("/detokenize", json={"tokens": [256, *body["tokens"]]})
    assert reply.json() == {"prompt": "<|bos|>hé"}


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "now", "description": "time"}}]])
async def test_a_conversation_into_tokens(running: Any, tools: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = (await running.http.post("/tokenize", json={"messages": messages, "tools": tools})).json()["tokens"]
    await running.chat(messages=messages, tools=tools, max_tokens=1)
    assert tokens == running.engine.requests[0].prompt_token_ids


async def test_two_tools_of_one_name_are_a_mistake_in_tokenize_too(running: Any) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool, tool]}
    assert (await running.http.post("/tokenize", json=body)).json()["error"]["param"] == "tools"


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, {"prompt": 5}])
async def test_one_text_or_one_conversation(running: Any, body: dict[str, Any]) -> None:
    assert (await running.http.post("/tokenize", json=body)).status_code == 400


async def test_tokens_that_do_not_exist(running: Any) -> None:
    assert (await running.http.post("/detokenize", json={"tokens": [999]})).json()["error"]["param"] == "tokens"


async def test_what_a_remote_tokenizer_asks(running: Any) -> None:
    info = (await running.http.get("/tokenizer_info")).json()
    assert (info["bos_token"], info["eos_token"], info["eos_token_id"]) == ("<|bos|>", "<|im_end|>", 259)
    assert "messages" in info["chat_template"]


async def test_small_questions(running: Any) -> None:
    assert (await running.http.get("/version")).json() == {"version": __version__}
    assert (await running.http.get("/ping")).status_code == (await running.http.post("/ping")).status_code == 200
    load = (await running.http.get("/load")).json()
    assert (load["server_load"], load["workers"][0]["worker_id"]) == (2, "decode-0")
    assert (await running.http.post("/reset_prefix_cache")).status_code == 200
    assert running.engine.num_resets == 1


async def test_a_page(running: Any) -> None:
    reply = await running.http.get("/")
    assert reply.headers["content-type"].startswith("text/html")
    assert "Diptych" in reply.text


async def test_the_schema_has_every_endpoint_and_real_models(running: Any) -> None:
    schema = (await running.http.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/ready", "/tokenize"} <= schema["paths"].keys()
    chat = schema["paths"]["/v1/chat/completions"]["post"]
    body = chat["requestBody"]["content"]["application/json"]["schema"]
    answer = chat["responses"]["200"]["content"]["application/json"]["schema"]
    assert (body["$ref"], answer["$ref"]) == (
        "#/components/schemas/ChatRequest",
        "#/components/schemas/ChatCompletion",
    )
    components = schema["components"]["schemas"]
    assert {"ChatRequest", "CompletionRequest", "Message", "ErrorBody", "ChatCompletion"} <= components.keys()
    assert components["ChatRequest"]["required"] == ["messages"]


async def test_answers_are_what_the_schema_says(running: Any) -> None:
    from diptych.router.api import responses

    whole = {"max_tokens": 2, "return_token_ids": True}
    chat = (await running.chat(logprobs=True, top_logprobs=2, **whole)).content
    responses.ChatCompletion.model_validate_json(chat, extra="forbid", strict=True)
    completion = (await running.completion(logprobs=2, **whole)).content
    responses.Completion.model_validate_json(completion, extra="forbid", strict=True)
    for path, model in (
        ("/v1/models", responses.ModelList), ("/load", responses.Load), ("/tokenizer_info", responses.TokenizerInfo),
        ("/version", responses.Version), ("/ready", responses.Status),
    ):  # fmt: skip
        model.model_validate_json((await running.http.get(path)).content, strict=True)
    error = (await running.completion(n=0)).content
    responses.ErrorBody.model_validate_json(error, extra="forbid", strict=True)

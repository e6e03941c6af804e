from __future__ import annotations

import math
import threading
import time
from typing import Any

import orjson
import pytest

from common import __version__
from common.model_files.tokenizer import Tokenizer
from router.api import info, load


async def test_health_and_ready(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(is_ready=(False, "no decode worker is ready")))
    assert (await running.http.get("/health")).json() == {"status": "ok"}
    reply = await running.http.get("/ready")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["error"]["message"] == "no decode worker is ready"
    running.engine.is_ready = (True, "")
    assert (await running.http.get("/ready")).status_code == 200


async def test_a_router_that_cannot_go_on_is_not_healthy(running: Any) -> None:
    running.app.state.router_state.failure = lambda: "router task 'ticks' ended"
    assert (await running.http.get("/health")).status_code == 503
    assert (await running.http.get("/ping")).status_code == 503


async def test_a_router_that_ends_takes_nothing_new(running: Any) -> None:
    running.app.state.router_state.draining = running.app.state.router_state.refusing = True
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
    assert tokens == list(running.engine.requests[0].prompt_token_ids)


async def test_two_tools_of_one_name_are_a_mistake_in_tokenize_too(running: Any) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool, tool]}
    assert (await running.http.post("/tokenize", json=body)).json()["error"]["param"] == "tools"


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, {"prompt": 5}])
async def test_one_text_or_one_conversation(running: Any, body: dict[str, Any]) -> None:
    assert (await running.http.post("/tokenize", json=body)).status_code == 400


async def test_tokens_that_do_not_exist(running: Any) -> None:
    assert (await running.http.post("/detokenize", json={"tokens": [999]})).json()["error"]["param"] == "tokens"


@pytest.mark.parametrize(
    "most", [2_000, pytest.param(500_000, marks=pytest.mark.slow)]
)  # different code reads bodies of each size
async def test_a_text_that_is_too_long_to_be_tokenised(start: Any, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.generation.served_model.ServedModel.max_tokenize_bytes", most)
    http = (await start()).http
    ok, long = "é" * (most // 2), "é" * (most // 2) + "e"
    assert (await http.post("/tokenize", json={"prompt": ok})).json()["count"] == most
    reply = await http.post("/tokenize", json={"prompt": long})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")
    assert f"the prompt has {most + 1:,} bytes; the maximum is {most:,}" in reply.json()["error"]["message"]
    chat = {"messages": [{"role": "user", "content": long}]}
    reply = await http.post("/tokenize", json=chat)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
    reply = await http.post("/v1/messages/count_tokens", json=chat)
    assert reply.status_code == 400 and f"bytes; the maximum is {most:,}" in reply.json()["error"]["message"]


@pytest.mark.parametrize("most", [500, 125_000])
async def test_too_many_ids_to_be_made_into_text(start: Any, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.generation.served_model.ServedModel.max_tokenize_bytes", 4 * most)
    http = (await start()).http
    assert (await http.post("/detokenize", json={"tokens": [104] * most})).json() == {"prompt": "h" * most}
    reply = await http.post("/detokenize", json={"tokens": [104] * (most + 1)})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tokens")
    assert f"at most {most:,} ids, not {most + 1:,}" in reply.json()["error"]["message"]


async def test_what_may_be_tokenised_grows_with_the_model(running: Any, start: Any, tools: Any) -> None:
    model = running.app.state.router_state.models.default
    assert (model.max_tokenize_bytes, model.max_detokenize_ids) == (2**20, 2**18)
    model = (await start(tools.Engine(max_model_len=2**17))).app.state.router_state.models.default
    assert (model.max_tokenize_bytes, model.max_detokenize_ids) == (2**21, 2**19)


async def test_long_answers_are_written_beside_the_event_loop(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()

    def noted(function: Any) -> Any:
        def call(*args: Any) -> Any:
            threads.add(threading.current_thread().name)
            return function(*args)

        return call

    monkeypatch.setattr(Tokenizer, "id_to_token", noted(Tokenizer.id_to_token))
    monkeypatch.setattr(info, "_json", noted(info._json))
    text = "hé" * 5000
    reply = await running.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})
    body = orjson.loads(reply.content)
    assert (body["count"], len(body["token_strs"])) == (15_000, 15_000)
    assert (await running.http.post("/detokenize", json={"tokens": body["tokens"]})).json() == {"prompt": text}
    assert threads and all(name.startswith("text-long") for name in threads)


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


@pytest.mark.parametrize(("path", "other"), [("/", "/dashboard"), ("/dashboard", "/")])
async def test_pages(running: Any, path: str, other: str) -> None:
    reply = await running.http.get(path)
    assert reply.headers["content-type"].startswith("text/html")
    assert "Diptych" in reply.text and f'href="{other}"' in reply.text
    assert reply.headers["content-security-policy"] == "frame-ancestors 'none'"


@pytest.mark.slow
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


async def test_load_has_the_plan_of_a_router_that_makes_one(start: Any) -> None:
    from router.api import service_answers
    from router.planner.loop import Outlook
    from router.planner.offered_load import OfferedLoad
    from router.planner.planner import Plan, PoolPlan
    from router.planner.pool import Fleet
    from router.planner.sizing import Prediction

    running = await start(slo_ttft_ms=500.0, slo_quantile=0.9)
    assert (await running.http.get("/load")).json()["plan"] is None
    plan = Plan({"decode": PoolPlan(2, 3, 1, "KV blocks")}, Prediction(math.inf, 0.02), unmet="too dear")
    running.app.state.router_state.models.default.outlook = lambda: Outlook(
        plan, OfferedLoad(rate=1.5), Fleet({}), (0.25, 0.0)
    )
    reply = await running.http.get("/load")
    service_answers.Load.model_validate_json(reply.content, strict=True)
    assert reply.json()["plan"] == {
        "pools": {"decode": {"wanted": 2, "needed": 3, "present": 1, "reason": "KV blocks"}},
        "quantile": 0.9,
        "requests_per_s": 1.5,
        "goals": {"ttft_ms": 500.0, "tpot_ms": 0.0},
        "predicted": {"ttft_ms": None, "tpot_ms": 20.0},
        "measured": {"ttft_ms": 250.0, "tpot_ms": 0.0},
        "unmet": "too dear",
        "held": "",
    }


async def test_answers_are_what_the_schema_says(running: Any) -> None:
    from router.api import service_answers
    from router.api.openai import answers as openai_answers

    whole = {"max_tokens": 2, "return_token_ids": True}
    chat = (await running.chat(logprobs=True, top_logprobs=2, **whole)).content
    openai_answers.ChatCompletion.model_validate_json(chat, extra="forbid", strict=True)
    completion = (await running.completion(logprobs=2, **whole)).content
    openai_answers.Completion.model_validate_json(completion, extra="forbid", strict=True)
    service_answers.Load.model_validate_json((await running.http.get("/load")).content, extra="forbid", strict=True)
    for path, model in (
        ("/v1/models", openai_answers.ModelList), ("/tokenizer_info", service_answers.TokenizerInfo),
        ("/version", service_answers.Version), ("/ready", service_answers.Status),
    ):  # fmt: skip
        model.model_validate_json((await running.http.get(path)).content, strict=True)
    error = (await running.completion(n=0)).content
    openai_answers.ErrorBody.model_validate_json(error, extra="forbid", strict=True)


async def test_the_history_of_the_load_is_that_of_the_dashboards_charts(running: Any) -> None:
    state = running.app.state.router_state
    await running.completion(max_tokens=3)
    load.record_load(state, time.time())
    body = (await running.http.get("/load/history")).json()
    (point,) = body["points"]
    assert (point["inFlight"], point["waiting"], point["ttft50"] > 0, point["prefillKv"]) == (2, 0, True, None)
    assert point["decodeKv"] == pytest.approx(0.1) and body["started_at"] <= point["at"]

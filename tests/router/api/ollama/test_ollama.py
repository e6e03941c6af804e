"""Ollama's API by hand; tests/clients asks by its official client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from common.errors import InternalError, Overloaded
from common.model_files.files import ModelFiles
from router.api.ollama.fields import OllamaChatRequest, served_name, tagged_name
from router.text.text_pipeline import TextPipeline

ARGUMENTS = '{"city": "Paris", "days": [1, 2]}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},
    {"function": {"name": "now", "description": "the time"}},
]
HI: Any = [{"role": "user", "content": "hi"}]
NUMBERS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


async def chat(running: Any, **fields: Any) -> list[Any]:
    """The lines of a stream, or the only one."""
    reply = await running.http.post("/api/chat", json={"model": "tiny-random", "messages": HI, **fields})
    assert reply.status_code == 200, reply.text
    streams = fields.get("stream", True)
    assert reply.headers["content-type"] == ("application/x-ndjson" if streams else "application/json")
    return [json.loads(line) for line in reply.text.splitlines()]


async def test_the_names_of_the_list_may_be_used(running: Any) -> None:
    """Open WebUI looks up NAME:latest in the list, and sends it."""
    (model,) = (await running.http.get("/api/tags")).json()["models"]
    (answer,) = await chat(running, model=model["name"], stream=False, keep_alive=-1, options={"num_predict": 1})
    assert answer["model"] == "tiny-random"


async def test_a_stream_ends_with_its_numbers(running: Any) -> None:
    *lines, last = await chat(running, options={"num_predict": 9})
    assert len(lines) > 1 and not any(line["done"] for line in lines)
    assert "".join(line["message"]["content"] for line in lines) == "The quick"
    assert {line["model"] for line in lines} == {"tiny-random"} and lines[0]["created_at"].endswith("Z")
    assert (last["message"]["content"], last["done"], last["done_reason"]) == ("", True, "length")
    assert last["eval_count"] == 9 and last["prompt_eval_count"] == len(running.engine.requests[0].prompt_token_ids)
    assert all(isinstance(last[name], int) and last[name] >= 0 for name in NUMBERS)
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"]


async def test_a_whole_answer(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(eos_after=5))
    (answer,) = await chat(running, stream=False)
    assert (answer["message"], answer["done_reason"]) == ({"role": "assistant", "content": "The q"}, "stop")
    assert answer["done"] and answer["eval_count"] == 6


async def test_options_reach_the_workers_and_the_rest_is_as_in_ollama(running: Any) -> None:
    options = {"num_predict": 3, "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "seed": 5, "num_ctx": 64}
    penalties = {"repeat_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    await chat(running, options=options | penalties | {"stop": ["x"]}, keep_alive="5m", think=False, format="")
    await chat(running, options={"seed": -1, "num_predict": -1, "stop": "f"})
    first, second = (request.params for request in running.engine.requests)
    assert (first.max_tokens, first.temperature, first.top_p, first.top_k, first.min_p) == (3, 0, 0.5, 7, 0.1)
    assert (first.repetition_penalty, first.presence_penalty, first.frequency_penalty) == (1.2, 0.5, 0.25)
    assert (second.temperature, second.top_p, second.top_k) == (0.8, 0.9, 40) and second.max_tokens > 3000


async def test_its_prompt_is_that_of_the_same_conversation(running: Any) -> None:
    await chat(running, messages=[{"role": "system", "content": "s"}, *HI], options={"num_predict": 1})
    body = {"model": "tiny-random", "system": "s", "prompt": "hi", "options": {"num_predict": 1}, "stream": False}
    generated = (await running.http.post("/api/generate", json=body)).json()
    await running.chat(messages=[{"role": "system", "content": "s"}, *HI], max_tokens=1)
    assert len({tuple(request.prompt_token_ids) for request in running.engine.requests}) == 1
    assert (generated["response"], generated["done_reason"], generated["eval_count"]) == ("T", "length", 1)
    raw = await running.http.post("/api/generate", json={"prompt": "hi", "raw": True, "options": {"num_predict": 2}})
    assert [json.loads(line)["response"] for line in raw.text.splitlines()] == ["T", "h", ""]
    assert bytes(list(running.engine.requests[-1].prompt_token_ids)).decode() == "hi"


async def test_a_base_model_continues_the_prompt(start: Any, tools: Any, files: ModelFiles) -> None:
    pipeline = TextPipeline.from_files(replace(files, chat_template=None), threads=1)
    running = await start(tools.Engine(eos_after=20), pipeline=pipeline)
    body = {"prompt": "hi", "stream": False}
    assert (await running.http.post("/api/generate", json=body)).json()["response"] == "The quick brown fox."
    assert bytes(list(running.engine.requests[0].prompt_token_ids)).decode() == "hi"
    refused = await running.http.post("/api/generate", json=body | {"system": "s"})
    assert refused.status_code == 400 and refused.json()["error"].startswith("system: a system prompt without a chat")
    pipeline.close()


@pytest.mark.parametrize("streams", [True, False])
async def test_calls_are_sent_whole(start: Any, tools: Any, streams: bool) -> None:
    text = f"I look. {CALL}\n{OTHER}"
    running = await start(tools.Engine(text=text, eos_after=len(text.encode()), per_event=3))
    lines = await chat(running, tools=TOOLS, stream=streams)
    messages = [line["message"] for line in lines]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert calls == [
        {"index": 0, "name": "get_weather", "arguments": json.loads(ARGUMENTS)},
        {"index": 1, "name": "now", "arguments": {}},
    ]
    assert (
        "".join(message["content"] for message in messages).strip() == "I look." and lines[-1]["done_reason"] == "stop"
    )


async def test_thoughts_are_separate_and_may_be_turned_off(start: Any, tools: Any, files: ModelFiles) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}<think>{% endif %}</think>"
    text = "<think>\nhm\n</think>\n\nyes"
    pipeline = TextPipeline.from_files(replace(files, chat_template=template), threads=1)
    running = await start(tools.Engine(text=text, eos_after=len(text)), pipeline=pipeline)
    (whole,) = await chat(running, think=True, stream=False)
    assert (whole["message"]["thinking"].strip(), whole["message"]["content"].strip()) == ("hm", "yes")
    lines = await chat(running, think="high")
    assert "".join(line["message"].get("thinking", "") for line in lines).strip() == "hm"
    assert "thinking" not in json.dumps(await chat(running, think=False))
    prompts = [bytes(list(request.prompt_token_ids)).decode() for request in running.engine.requests]
    assert prompts == ["hi<think></think>", "hi<think></think>", "hi</think>"]
    pipeline.close()


async def test_a_format_constrains_the_answer(running: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    await chat(running, format=schema, options={"num_predict": 1})
    await chat(running, format="json", options={"num_predict": 1})
    await chat(running, options={"num_predict": 1})
    first, second, third = (request.params.grammar for request in running.engine.requests)
    assert first and second and first != second and not third


def test_results_without_ids_belong_to_the_calls_before() -> None:
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("f", "g")]
    results = [{"role": "tool", "tool_name": "f", "content": "1"}, {"role": "tool", "content": "2"}]
    request = OllamaChatRequest.model_validate(
        {"messages": [*HI, {"role": "assistant", "tool_calls": calls}, *results]}, strict=True
    )
    _, asked, one, two = (message.as_dict() for message in request.as_chat().messages)
    assert [call["id"] for call in asked["tool_calls"]] == [one["tool_call_id"], two["tool_call_id"]]
    assert (one["name"], asked["tool_calls"][0]["function"]["arguments"]) == ("f", '{"a":1}')


async def test_without_a_prompt_the_model_is_loaded(running: Any) -> None:
    (loaded,) = await chat(running, messages=[], stream=False)
    assert (loaded["done"], loaded["done_reason"], loaded["message"]["content"]) == (True, "load", "")
    body = {"model": "tiny-random", "keep_alive": 0}
    assert (await running.http.post("/api/generate", json=body)).json()["done_reason"] == "unload"
    assert (await running.http.post("/api/generate", json={"model": "no"})).status_code == 404
    assert running.engine.requests == []


@pytest.mark.parametrize(
    ("fields", "status", "error"),
    [
        ({"model": "absent"}, 404, "The model 'absent' does not exist"),
        ({"options": {"temperature": -1}}, 400, "options.temperature: "),
        ({"options": {"mirostat": 2}}, 400, "options.mirostat: 2 is not supported by this server"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aaaa"]}]}, 400, "messages[0].images: "),
        ({"options": {"num_predict": 10**6}}, 400, "This model's maximum context length is 4096 tokens"),
        ({"format": {"type": "nothing"}}, 400, "format"),
    ],
)
async def test_errors_are_texts(running: Any, fields: dict[str, Any], status: int, error: str) -> None:
    reply = await running.http.post("/api/chat", json={"messages": HI} | fields)
    assert reply.status_code == status and reply.json()["error"].startswith(error), reply.text


async def test_an_error_in_a_stream_is_its_last_line(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(error=InternalError("broken"), error_after=3))
    *lines, last = await chat(running)
    assert last == {"error": "broken"} and "".join(line["message"]["content"] for line in lines) == "The"
    full = await start(tools.Engine(full=Overloaded("full")))
    reply = await full.http.post("/api/chat", json={"messages": HI})
    assert reply.status_code == 429 and reply.json() == {"error": "full"} and "retry-after" in reply.headers


async def test_an_idle_stream_is_kept_open_by_lines(start: Any, tools: Any) -> None:
    """A client reads every line as JSON: blank lines and comments would end it."""
    running = await start(tools.Engine(hold_after=2), keepalive_s=0.01)
    async with running.http.stream("POST", "/api/chat", json={"messages": HI, "options": {"num_predict": 4}}) as reply:
        found = []
        async for line in reply.aiter_lines():
            found.append(json.loads(line))
            if len(found) == 5:
                running.engine.go.set()
    assert "".join(line["message"]["content"] for line in found) == "The " and found[-1]["done"]


async def test_models(running: Any) -> None:
    (model,) = (await running.http.get("/api/tags")).json()["models"]
    assert (model["name"], model["model"], len(model["digest"])) == ("tiny-random:latest", "tiny-random:latest", 64)
    assert model["details"]["family"] == "llama" and model["details"]["parameter_size"] == "0.21M" and model["size"] > 0
    shown = (await running.http.post("/api/show", json={"model": "tiny:random"})).json()
    assert shown["capabilities"] == ["completion"] or "completion" in shown["capabilities"]
    assert shown["model_info"]["llama.context_length"] == 4096 and "message" in shown["template"]
    (loaded,) = (await running.http.get("/api/ps")).json()["models"]
    assert loaded["name"] == "tiny-random:latest" and loaded["context_length"] == 4096
    assert (await running.http.get("/api/version")).json()["version"].count(".") == 2
    missing = await running.http.post("/api/show", json={"name": "absent"})
    assert missing.status_code == 404 and "'absent' does not exist" in missing.json()["error"]
    unknown = (await running.http.get("/api/blobs")).json()["error"]
    assert unknown.startswith("Unknown path: /api/blobs")


def test_names_are_those_of_ollama() -> None:
    assert [tagged_name(name) for name in ("mine", "a:b")] == ["mine:latest", "a:b"]
    assert [served_name(name) for name in ("smollm2:135m", "mine:latest", "org/x-GGUF:Q4_K_M")] == [
        "smollm2-135m", "mine", "org/x-GGUF:Q4_K_M",
    ]  # fmt: skip


async def test_models_are_managed_by_administrators_only(start: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nname = "bob"\nkey = "bobs-secret-key-123"\n')
    running = await start(api_key_file=str(keys), headers={"Authorization": "Bearer bobs-secret-key-123"})
    for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
        reply = await running.http.request(method, path, json={"model": "tiny-random"})
        assert reply.status_code == 403 and reply.json()["error"] == f"{path} requires an API key with admin = true."
    public = await start()
    public.app.state.router_state.is_loopback = False
    reply = await public.http.post("/api/pull", json={"model": "tiny-random"})
    assert reply.status_code == 403 and reply.json()["error"].startswith("/api/pull is disabled")


async def test_a_model_is_deleted_unless_it_is_served(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    running.app.state.router_state.is_loopback = True
    for name in ("smollm2-135m", "gemma3-270m"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "model.gguf").write_bytes(b"x")

    async def delete(name: str) -> Any:
        return await running.http.request("DELETE", "/api/delete", json={"model": name})

    assert (await delete("gemma3:270m")).status_code == 200
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["smollm2-135m"]
    assert (await delete("gemma3-270m")).status_code == 404
    refused = await running.http.post("/api/pull", json={"model": "--force"})
    assert refused.status_code == 400 and refused.json()["error"].startswith("model: must be a built-in name")


@pytest.mark.slow
async def test_a_download_streams_its_progress(running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    running.app.state.router_state.is_loopback = True
    reply = await running.http.post("/api/pull", json={"model": "tiny-random"})
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert lines[0] == {"status": "pulling manifest"} and lines[-1] == {"status": "success"}
    assert lines[-2]["status"] == "pulling tiny-random" and lines[-2]["completed"] > 800_000
    failed = await running.http.post("/api/pull", json={"model": "org/absent", "stream": False})
    assert failed.status_code == 400 and "org/absent" in failed.json()["error"]

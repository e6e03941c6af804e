from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from common.errors import DeadlineExceeded, Overloaded, Unavailable

PATHS = ["/v1/completions", "/v1/chat/completions"]


def texts(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def reasons(events: list[Any]) -> list[tuple[int, str]]:
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    return [(choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"]]


async def test_a_chat_begins_with_the_role_and_ends_with_done(running: Any) -> None:
    events = await running.events("chat", max_tokens=3)
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert texts(events) == "The"
    assert reasons(events) == [(0, "length")]
    assert events[-1] == "[DONE]"
    assert len({event["id"] for event in events[:-1]}) == 1
    assert all("usage" not in event for event in events[:-1])


async def test_a_completion(running: Any) -> None:
    events = await running.events(max_tokens=3)
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["T", "h", "e"]
    assert reasons(events) == [(0, "length")]


@pytest.mark.parametrize("path", PATHS)
async def test_usage_comes_last_and_is_null_before(running: Any, path: str) -> None:
    events = await running.events(path, max_tokens=3, stream_options={"include_usage": True})
    assert [event["usage"] for event in events[:-2]] == [None] * (len(events) - 2)
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 3


async def test_usage_in_every_chunk(running: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await running.events(max_tokens=3, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [1, 2, 3, 3]


async def test_an_end_token_is_no_text(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(eos_after=3))
    events = await running.events("chat", return_token_ids=True)
    assert (texts(events), reasons(events)) == ("The", [(0, "stop")])
    ids = [token_id for event in events[1:-1] for token_id in event["choices"][0]["token_ids"]]
    assert ids == [84, 104, 101, tools.EOS]
    assert events[0]["prompt_token_ids"] == list(running.engine.requests[0].prompt_token_ids)


async def test_choices_interleave(running: Any) -> None:
    events = await running.events("chat", n=3, max_tokens=4)
    assert [texts(events, i) for i in range(3)] == ["The "] * 3
    assert sorted(reasons(events)) == [(0, "length"), (1, "length"), (2, "length")]
    assert [event["choices"][0]["index"] for event in events[:-1]].index(2) < 9


async def test_an_echo_comes_first(running: Any) -> None:
    events = await running.events(prompt=["ab", "cd"], echo=True, max_tokens=2, return_token_ids=True)
    assert [event["choices"][0]["text"] for event in events[:2]] == ["ab", "cd"]
    assert events[1]["choices"][0]["prompt_token_ids"] == [99, 100]
    assert (texts(events, 0), texts(events, 1)) == ("abTh", "cdTh")


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("per_event", [1, 2, 5, 100])
@pytest.mark.parametrize("logprobs", [None, 0])
async def test_a_stop_string_over_tokens(start: Any, tools: Any, per_event: int, logprobs: int | None) -> None:
    running = await start(tools.Engine(per_event=per_event))
    fields = {"stop": ["wn f", "zzz"], "max_tokens": 100, "logprobs": logprobs, "return_token_ids": True}
    whole = (await running.completion(**fields)).json()
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("The quick bro", "stop")
    assert whole["usage"]["completion_tokens"] == len(choice["token_ids"]) == len("The quick brown f")
    if logprobs is not None:
        assert "".join(choice["logprobs"]["tokens"]) == "The quick brown f"
        assert choice["logprobs"]["text_offset"] == [*range(13), *[13] * 4]
    events = await running.events(**fields)
    assert (texts(events), reasons(events)) == ("The quick bro", [(0, "stop")])
    shown = [event["choices"][0]["logprobs"] for event in events[:-1]]
    if logprobs is not None:
        assert "".join(token for part in shown if part for token in part["tokens"]) == "The quick brown f"


async def test_a_stop_string_ends_the_generation(running: Any) -> None:
    await running.completion(stop="quick", max_tokens=1000)
    assert running.engine.aborted == [running.engine.requests[0].request_id]


async def test_the_stop_string_is_shown_on_request(running: Any) -> None:
    reply = await running.completion(stop="quick", include_stop_str_in_output=True)
    assert reply.json()["choices"][0]["text"] == "The quick"


async def test_no_stop_string_in_the_first_min_tokens(running: Any) -> None:
    reply = await running.completion(stop=" ", min_tokens=4, max_tokens=50)
    assert reply.json()["choices"][0]["text"] == "The quick"


async def test_text_like_a_stop_string_comes_out_at_the_end(running: Any) -> None:
    events = await running.events(stop="The quack", max_tokens=7)
    assert (texts(events), reasons(events)) == ("The qui", [(0, "length")])


async def test_held_text_is_flushed(running: Any) -> None:
    events = await running.events(stop="The quack", max_tokens=6)
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["The qu"]


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_characters_split_over_tokens(start: Any, tools: Any, logprobs: int | None) -> None:
    running = await start(tools.Engine(text="é漢🙂"))
    events = await running.events(max_tokens=9, logprobs=logprobs)
    said = [event["choices"][0]["text"] for event in events[:-1]]
    assert said == ["é", "漢", "🙂"] if logprobs is None else said == ["", "é", "", "", "漢", "", "", "", "🙂"]
    cut = await running.events(max_tokens=7, logprobs=logprobs)
    assert texts(cut) == "é漢\ufffd"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("error", [Overloaded("full", retry_after_s=2.2), Unavailable("no worker")])
async def test_a_refusal_before_the_first_token_is_a_status(start: Any, tools: Any, path: str, error: Any) -> None:
    running = await start(tools.Engine(error=error))
    ask = running.chat if "chat" in path else running.completion
    for stream in (False, True):
        reply = await ask(stream=stream)
        assert reply.status_code == error.status
        assert reply.json()["error"]["message"] == error.message
        assert int(reply.headers["retry-after"]) == (3 if error.retry_after_s else 1)


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_after_the_start_is_an_event_and_the_end(start: Any, tools: Any, path: str) -> None:
    running = await start(tools.Engine(error=DeadlineExceeded("too late"), error_after=3))
    events = await running.events(path, max_tokens=9)
    assert texts(events) == "The"
    error = {"message": "too late", "type": "server_error", "param": None, "code": "deadline_exceeded"}
    assert events[-1] == {"error": error}


async def test_a_bug_says_nothing_of_itself(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(error=ZeroDivisionError("secret"), error_after=1))
    assert "secret" not in json.dumps((await running.events(max_tokens=9))[-1])
    reply = await running.completion()
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")


async def test_silence_is_filled_with_comments(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(hold_after=0), keepalive_s=0.02)
    async with running.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as reply:
        lines = reply.aiter_lines()
        assert [await anext(lines) for _ in range(4)] == [": keep-alive", "", ": keep-alive", ""]
        running.engine.go.set()
        rest = [line async for line in lines]
    assert rest[-2:] == ["data: [DONE]", ""]
    assert json.loads(next(line for line in rest if "text" in line)[6:])["choices"][0]["text"] == "T"


async def test_text_that_is_held_back_is_silence(start: Any, tools: Any) -> None:
    """The stream has a keep-alive comment when one is due, and not for each token."""
    body = {"prompt": "a", "stream": True, "stop": "The quick brown fox!", "max_tokens": 12}
    running = await start(tools.Engine(hold_after=6), keepalive_s=0.02)
    async with running.http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.aiter_lines()
        assert [await anext(lines) for _ in range(4)] == [": keep-alive", "", ": keep-alive", ""]
        running.engine.go.set()
        assert "The quick br" in "".join([line async for line in lines])
    running = await start(tools.Engine())
    reply = await running.http.post("/v1/completions", json=body)
    assert ": keep-alive" not in reply.text and reply.text.count("data: ") == 2


async def test_a_first_token_without_text_is_no_silence(start: Any, tools: Any) -> None:
    """vLLM's bench joins a comment and the event behind it, and drops both."""
    running = await start(tools.Engine(script=list("é".encode())))
    reply = await running.completion(stream=True, max_tokens=2)
    assert ": keep-alive" not in reply.text and '"text":"é"' in reply.text


async def test_a_late_refusal_is_an_event(start: Any, tools: Any) -> None:
    engine = tools.Engine(hold_after=0, error=Unavailable("gone"), error_after=0)
    running = await start(engine, keepalive_s=0.02)
    request = asyncio.create_task(running.completion(stream=True))
    await asyncio.sleep(0.1)
    engine.go.set()
    assert '{"error":{"message":"gone"' in (await request).text


async def test_headers(running: Any) -> None:
    reply = await running.chat(stream=True, max_tokens=1)
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"


# ---------------------------------------------------------------- clients that leave


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hold_after", [0, 5])
async def test_a_client_that_leaves_ends_its_generation(
    start: Any, tools: Any, path: str, stream: bool, hold_after: int
) -> None:
    running = await start(tools.Engine(hold_after=hold_after))
    ask = running.chat if "chat" in path else running.completion
    request = asyncio.create_task(ask(stream=stream, n=2, max_tokens=100))
    await tools.until(lambda: len(running.engine.requests) == 2)
    request.cancel()
    await tools.until(lambda: len(running.engine.aborted) == 2)
    assert set(running.engine.aborted) == {sent.request_id for sent in running.engine.requests}
    await tools.until(lambda: running.app.state.router_state.num_active == 0)
    labels = f'path="{path}",status="499"'
    assert (
        await running.metric(f'diptych_http_requests_total{{engine="router",model_name="{tools.MODEL}",{labels}') == 1
    )


@pytest.mark.slow
async def test_a_client_that_reads_slowly_does_not_slow_others(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(per_event=64))
    body = {"prompt": "a", "stream": True, "max_tokens": 4000, "n": 64}
    async with running.http.stream("POST", "/v1/completions", json=body) as slow:
        assert slow.status_code == 200
        assert (await running.completion(max_tokens=4)).json()["choices"][0]["text"] == "The "
    await tools.until(lambda: running.app.state.router_state.num_active == 0)

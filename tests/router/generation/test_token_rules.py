"""Fields that speak of tokens: what they become for the workers, and what the answer shows of them."""

from __future__ import annotations

from typing import Any

import pytest

from common.wire.sampling_params import BadWord, TokenLogprobs
from router.dispatch.client import TokenEvent


def params(running: Any) -> Any:
    return running.engine.requests[-1].params


@pytest.mark.parametrize("endpoint", ["completion", "chat"])
async def test_allowed_tokens_and_bad_words_reach_the_workers(running: Any, endpoint: str) -> None:
    fields = {"allowed_token_ids": [65, 66, 65], "bad_words": ["ab", " c"], "max_tokens": 2}
    assert (await getattr(running, endpoint)(**fields)).status_code == 200
    assert params(running).allowed_token_ids == (65, 66)
    assert set(params(running).bad_words) == set(map(BadWord.of, [(97, 98), (32, 97, 98), (32, 99), (99,)]))


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, b"efg"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, b"abc"),
        ({"truncate_prompt_tokens": 100}, b"abcdefg"),
        ({"truncate_prompt_tokens": -1}, b"abcdefg"),
    ],
)
@pytest.mark.parametrize("prompt", ["abcdefg", [*b"abcdefg"], ["abcdefg"]])
async def test_a_prompt_is_truncated(running: Any, fields: dict[str, Any], kept: bytes, prompt: Any) -> None:
    reply = await running.completion(prompt=prompt, **fields)
    assert reply.status_code == 200
    assert list(running.engine.requests[-1].prompt_token_ids) == [*kept]
    assert reply.json()["usage"]["prompt_tokens"] == len(kept)


async def test_a_prompt_that_is_too_long_is_truncated_to_what_fits(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(max_model_len=100))
    long = "x" * 50 + "y" * 500
    assert (await running.completion(prompt=long, max_tokens=10)).status_code == 400
    assert (await running.completion(prompt=long, max_tokens=10, truncate_prompt_tokens=-1)).status_code == 200
    assert list(running.engine.requests[-1].prompt_token_ids) == [*b"y" * 90]
    assert (await running.completion(prompt=long, max_tokens=10, truncate_prompt_tokens=95)).status_code == 400


async def test_a_conversation_is_truncated(running: Any) -> None:
    await running.chat(max_tokens=1)
    whole = running.engine.requests[-1].prompt_token_ids
    await running.chat(max_tokens=1, truncate_prompt_tokens=5)
    assert running.engine.requests[-1].prompt_token_ids == whole[-5:]


async def test_zero_logprobs_are_those_of_the_tokens(running: Any) -> None:
    logprobs = (await running.completion(max_tokens=3, logprobs=0)).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"] == [{"T": -0.5}, {"h": -0.5}, {"e": -0.5}]


async def test_logprobs_have_the_tokens_of_token_ids(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(eos_after=3))
    fields = {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
    (choice,) = (await running.completion(**fields)).json()["choices"]
    assert choice["text"] == "The"
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["token_ids"][-1] == tools.EOS and choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    (choice,) = (await running.chat(**fields | {"logprobs": True})).json()["choices"]
    assert [token["token"] for token in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]


async def test_the_whole_vocabulary_where_the_operator_allows_it(start: Any) -> None:
    running = await start(max_logprobs=-1)
    size = running.app.state.router_state.models.default.text.vocab_size
    assert (await running.completion(max_tokens=2, logprobs=-1, prompt_logprobs=-1)).status_code == 200
    assert params(running).logprobs == params(running).prompt_logprobs == size
    assert (await running.chat(max_tokens=2, logprobs=True, top_logprobs=-1)).status_code == 200
    reply = await running.completion(max_tokens=2000, logprobs=-1)
    assert reply.status_code == 400 and "500,000" in reply.json()["error"]["message"]


async def test_the_bound_on_alternatives_is_named(running: Any) -> None:
    for field in ("logprobs", "prompt_logprobs"):
        error = (await running.completion(**{field: -1})).json()["error"]
        assert error["param"] == field and "--max-logprobs" in error["message"] and "20" in error["message"]


async def test_logprobs_of_chosen_tokens(running: Any) -> None:
    await running.completion(max_tokens=1, logprobs=2, logprob_token_ids=[70, 71, 70])
    assert params(running).logprob_token_ids == (70, 71)


async def test_ranks_of_prompt_tokens(start: Any, tools: Any) -> None:
    class Ranked(tools.Engine):  # type: ignore[misc, name-defined]
        def _event(self, request: Any, tokens: list[int], reason: str) -> TokenEvent:
            prompt = tuple(TokenLogprobs(-5.0, ((7, -0.1),), 43) for _ in request.prompt_token_ids[1:])
            return TokenEvent(tuple(tokens), (), reason, 0, None, prompt)

    running = await start(Ranked())
    (choice,) = (await running.completion(prompt="hi", prompt_logprobs=1, max_tokens=1)).json()["choices"]
    assert choice["prompt_logprobs"][1]["105"]["rank"] == 43 and choice["prompt_logprobs"][1]["7"]["rank"] == 1


async def test_the_likeliest_of_several_answers(start: Any, tools: Any) -> None:
    class Varied(tools.Engine):  # type: ignore[misc, name-defined]
        def _event(self, request: Any, tokens: list[int], reason: str) -> TokenEvent:
            value = {0: -3.0, 1: -1.0, 2: -2.0}[int(request.request_id.rpartition("-")[2]) % 3]
            return TokenEvent(tuple(tokens), tuple(TokenLogprobs(value) for _ in tokens), reason)

    running = await start(Varied())
    fields = {"prompt": ["a", "b"], "max_tokens": 2, "n": 2, "best_of": 3, "logprobs": 0}
    body = (await running.completion(**fields)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"]["token_logprobs"][0] for choice in body["choices"]] == [-1.0, -2.0] * 2
    assert body["usage"]["completion_tokens"] == 12
    body = (await running.completion(prompt="a", best_of=3, max_tokens=2)).json()
    assert len(body["choices"]) == 1 and body["choices"][0]["logprobs"] is None
    assert (await running.completion(best_of=2, stream=True)).status_code == 400
    assert (await running.completion(best_of=1, stream=True)).status_code == 200


async def test_an_answer_that_echoes_the_message_it_continues(running: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So: "}]
    fields = {"messages": messages, "continue_final_message": True, "max_tokens": 3, "echo": True}
    body = (await running.chat(**fields)).json()
    assert body["choices"][0]["message"]["content"] == "So: The"
    events = await running.events("chat", **fields)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]) == "So: The"
    for said in ([{"type": "refusal", "refusal": "So: "}], [{"type": "text", "text": "So: "}]):
        body = (await running.chat(**fields | {"messages": [messages[0], messages[1] | {"content": said}]})).json()
        assert body["choices"][0]["message"]["content"] == "So: The"
    body = (await running.chat(messages=messages[:1], max_tokens=3, echo=True)).json()
    assert body["choices"][0]["message"]["content"] == "The"


async def test_roles_that_the_template_shows(running: Any, text: Any) -> None:
    assert (await running.chat(messages=[{"role": "critic", "content": "hm"}], max_tokens=1)).status_code == 200
    shown = text.tokenizer.decode(running.engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert "<|im_start|>critic\nhm<|im_end|>" in shown


async def test_what_ended_an_answer(start: Any, tools: Any) -> None:
    running = await start(tools.Engine())
    for fields, reason in [({"stop": ["qu"]}, "qu"), ({"stop_token_ids": [101]}, 101), ({"max_tokens": 1}, None)]:
        for ask, path in ((running.completion, "/v1/completions"), (running.chat, "chat")):
            (choice,) = (await ask(**fields)).json()["choices"]
            assert choice["stop_reason"] == reason
            *before, last, _ = await running.events(path, **fields)
            assert last["choices"][0]["stop_reason"] == reason
            assert all("stop_reason" not in event["choices"][0] for event in before)


async def test_many_stop_strings(running: Any) -> None:
    (choice,) = (await running.completion(stop=[f"<{i}>" for i in range(63)] + ["ick"])).json()["choices"]
    assert choice["text"] == "The qu"


async def test_a_budget_of_thoughts_needs_a_model_that_thinks(running: Any) -> None:
    assert (await running.chat(max_tokens=2, thinking_token_budget=-1)).status_code == 200
    assert params(running).thinking is None
    assert (await running.chat(max_tokens=2, thinking_token_budget=1)).status_code == 400


@pytest.mark.slow
async def test_one_endpoint_takes_both_kinds_of_requests(running: Any) -> None:
    text = (await running.http.post("/invocations", json={"prompt": "hi", "max_tokens": 3})).json()
    assert (text["object"], text["choices"][0]["text"]) == ("text_completion", "The")
    messages = [{"role": "user", "content": "hi"}]
    chat = (await running.http.post("/invocations", json={"messages": messages, "max_tokens": 3})).json()
    assert chat["choices"][0]["message"]["content"] == "The"
    streamed = await running.http.post("/invocations", json={"messages": messages, "max_tokens": 3, "stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")
    long = await running.http.post("/invocations", json={"prompt": "x" * 2_000_000, "truncate_prompt_tokens": 4})
    assert long.status_code == 400 and "1,048,576" in long.json()["error"]["message"]
    long = await running.http.post("/invocations", json={"prompt": "x" * 900_000, "truncate_prompt_tokens": 4})
    assert list(running.engine.requests[-1].prompt_token_ids) == [*b"xxxx"]
    wrong = await running.http.post("/invocations", json={"prompt": 5})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt")
    wrong = await running.http.post("/invocations", json={"messages": [{"role": "user", "content": 5}]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages[0].content")
    assert (await running.http.post("/invocations", json={})).status_code == 400
    assert long.status_code == 200

from __future__ import annotations

from typing import Any

import pytest

USER = {"role": "user", "content": "hi"}


async def test_a_chat(running: Any) -> None:
    body = (await running.chat(max_tokens=9)).json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    message = {"role": "assistant", "content": "The quick", "refusal": None}
    nothing = dict.fromkeys(("logprobs", "stop_reason", "token_ids"))
    assert body["choices"] == [{"index": 0, "message": message, "finish_reason": "length", **nothing}]
    assert body["usage"]["completion_tokens"] == 9


async def test_the_template_makes_the_prompt(running: Any, text: Any) -> None:
    await running.chat(max_tokens=1)
    shown = text.tokenizer.decode(running.engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert shown == "<|bos|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_the_answer_may_be_as_long_as_fits(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(eos_after=2))
    await running.chat()
    request = running.engine.requests[0]
    assert request.params.max_tokens == 4096 - len(request.prompt_token_ids)


async def test_more_choices_than_ever_fit_are_the_requests_fault(start: Any) -> None:
    running = await start(max_inflight=4)
    for ask in (running.chat, running.completion):
        assert (await ask(n=4, max_tokens=1)).status_code == 200
        reply = await ask(n=5)  # after a 503 its client would retry for ever
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n")


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 9}]
)
async def test_both_names_of_the_limit(running: Any, fields: dict[str, int]) -> None:
    assert (await running.chat(**fields)).json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "be brief"}, USER],
        [{"role": "system", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]}, USER],
        [USER, {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
         {"role": "tool", "tool_call_id": "1", "content": "42"}],
        [{"role": "user", "name": "ann", "content": "hi"}],
    ],
)  # fmt: skip
async def test_messages_of_every_role(running: Any, messages: list[dict[str, Any]]) -> None:
    assert (await running.chat(messages=messages, max_tokens=1)).status_code == 200


async def test_the_last_message_can_be_continued(running: Any, text: Any) -> None:
    messages = [USER, {"role": "assistant", "content": "Once upon"}]
    await running.chat(messages=messages, continue_final_message=True, max_tokens=1)
    shown = text.tokenizer.decode(running.engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert shown.endswith("assistant\nOnce upon")


async def test_logprobs(running: Any) -> None:
    reply = await running.chat(max_tokens=2, logprobs=True, top_logprobs=1)
    content = reply.json()["choices"][0]["logprobs"]["content"]
    alternatives = [{"token": "a", "logprob": -1.0, "bytes": [97]}]
    assert content[0] == {"token": "T", "logprob": -0.5, "bytes": [84], "top_logprobs": alternatives}
    assert len(content) == 2


async def test_bytes_of_a_partial_character(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(text="é"))
    content = (await running.chat(max_tokens=2, logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert [token["bytes"] for token in content] == [[0xC3], [0xA9]]
    assert [token["top_logprobs"] for token in content] == [[], []]


async def test_token_ids(running: Any) -> None:
    body = (await running.chat(max_tokens=2, return_token_ids=True)).json()
    assert body["choices"][0]["token_ids"] == [84, 104]
    assert body["prompt_token_ids"] == list(running.engine.requests[0].prompt_token_ids)


async def test_tools_that_must_not_be_called_are_no_error(running: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert (await running.chat(tools=tools, tool_choice="none", max_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "text"}}, {"modalities": ["text"]}, {"tool_choice": "auto"}]
)
async def test_what_changes_nothing_is_taken(running: Any, fields: dict[str, Any]) -> None:
    assert (await running.chat(max_tokens=1, **fields)).status_code == 200

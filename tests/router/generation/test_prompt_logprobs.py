"""Log-probabilities of the prompt: with an echo as in OpenAI's API, and `prompt_logprobs` as in vLLM's."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from router.generation.logprobs import LogprobFormatter

ECHO = {
    "tokens": ["h", "i", "T", "h"],
    "token_logprobs": [None, -105.0, -0.5, -0.5],
    "top_logprobs": [None, {"a": -0.25, "i": -105.0}, {"a": -1.0, "T": -0.5}, {"a": -1.0, "h": -0.5}],
    "text_offset": [0, 1, 2, 3],
}


async def test_an_echo_has_them_before_those_of_the_answer(running: Any) -> None:
    (choice,) = (await running.completion(prompt="hi", echo=True, logprobs=1, max_tokens=2)).json()["choices"]
    assert (choice["text"], choice["logprobs"]) == ("hiTh", ECHO)
    params = running.engine.requests[0].params
    assert (params.prompt_logprobs, params.logprobs, params.max_tokens) == (1, 1, 2)


async def test_a_streamed_echo_has_them_in_its_first_chunk(running: Any) -> None:
    events = await running.events(prompt="hi", echo=True, logprobs=1, max_tokens=2)
    choices = [event["choices"][0] for event in events[:-1]]
    assert [choice["text"] for choice in choices] == ["hiT", "h"]
    joined = {key: [value for choice in choices for value in choice["logprobs"][key]] for key in ECHO}
    assert joined == ECHO


async def test_a_streamed_echo_with_the_prompts_ids_comes_once(running: Any) -> None:
    events = await running.events(prompt="hi", echo=True, logprobs=0, max_tokens=2, return_token_ids=True)
    choices = [event["choices"][0] for event in events[:-1]]
    assert choices[0]["prompt_token_ids"] == [104, 105]
    assert "".join(choice["text"] for choice in choices) == "hiTh"


@pytest.mark.parametrize("stream", [False, True])
async def test_without_tokens_of_its_own_the_answer_is_about_the_prompt(running: Any, stream: bool) -> None:
    fields = {"prompt": "hi", "echo": True, "logprobs": 1, "max_tokens": 0}
    if stream:
        events = await running.events(**fields, stream_options={"include_usage": True})
        (choice,), usage = events[0]["choices"], events[-2]["usage"]
    else:
        body = (await running.completion(**fields)).json()
        (choice,), usage = body["choices"], body["usage"]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
    assert choice["logprobs"] == {key: values[:2] for key, values in ECHO.items()}
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 0)
    assert running.engine.requests[0].params.max_tokens == 1


async def test_an_echo_alone_has_none(running: Any) -> None:
    (choice,) = (await running.completion(prompt="hi", echo=True, max_tokens=0)).json()["choices"]
    assert (choice["text"], choice["logprobs"]) == ("hi", None)
    assert running.engine.requests[0].params.prompt_logprobs == -1


async def test_log_probabilities_without_an_echo_are_the_answers_alone(running: Any) -> None:
    await running.completion(prompt="hi", logprobs=1)
    assert running.engine.requests[0].params.prompt_logprobs == -1


async def test_every_prompt_and_choice_has_its_own(running: Any) -> None:
    fields = {"prompt": ["hi", "Hi!"], "echo": True, "logprobs": 0, "max_tokens": 0, "n": 2}
    choices = (await running.completion(**fields)).json()["choices"]
    assert [choice["text"] for choice in choices] == ["hi", "hi", "Hi!", "Hi!"]
    assert [choice["logprobs"]["token_logprobs"] for choice in choices] == [[None, -105.0]] * 2 + [
        [None, -105.0, -33.0]
    ] * 2
    assert choices[3]["logprobs"]["text_offset"] == [0, 1, 2]
    assert choices[3]["logprobs"]["top_logprobs"] == [None, {"i": -105.0}, {"!": -33.0}]


async def test_the_places_of_parts_of_a_character_and_of_control_tokens(running: Any) -> None:
    prompt = [256, 0xC3, 0xA9, 33]
    fields = {"prompt": [prompt], "echo": True, "logprobs": 0, "max_tokens": 0}
    (choice,) = (await running.completion(**fields)).json()["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("é!", [0, 0, 0, 1])
    (choice,) = (await running.completion(**fields, skip_special_tokens=False)).json()["choices"]
    begin = choice["text"].index("é")
    assert begin and choice["logprobs"]["text_offset"] == [0, begin, begin, begin + 1]


async def test_prompt_logprobs_of_a_completion(running: Any) -> None:
    (choice,) = (await running.completion(prompt="hi", prompt_logprobs=2, max_tokens=1)).json()["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        {
            "97": {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
            "98": {"logprob": -1.25, "rank": 2, "decoded_token": "b"},
            "105": {"logprob": -105.0, "rank": None, "decoded_token": "i"},
        },
    ]
    assert (choice["text"], choice["logprobs"]) == ("T", None)


async def test_prompt_logprobs_of_a_conversation(running: Any) -> None:
    body = (await running.chat(prompt_logprobs=0, max_tokens=2)).json()
    prompt = running.engine.requests[0].prompt_token_ids
    assert [None if entry is None else [*entry] for entry in body["prompt_logprobs"]] == [
        None,
        *([str(token)] for token in prompt[1:]),
    ]
    body = (await running.chat(max_tokens=2)).json()
    assert body["prompt_logprobs"] is None and body["prompt_token_ids"] is None


async def test_both_kinds_at_once_show_as_many_alternatives_as_each_wants(running: Any) -> None:
    fields = {"prompt": "hi", "prompt_logprobs": 0, "echo": True, "logprobs": 1, "max_tokens": 0}
    (choice,) = (await running.completion(**fields)).json()["choices"]
    assert running.engine.requests[0].params.prompt_logprobs == 1
    assert [*choice["prompt_logprobs"][1]] == ["105"]
    assert choice["logprobs"]["top_logprobs"][1] == {"a": -0.25, "i": -105.0}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"prompt_logprobs": 20, "prompt": ["x" * 1000] * 24}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 20, "prompt": ["x" * 1000] * 12, "n": 2}, "logprobs"),
    ],
)
async def test_what_makes_no_sense_or_too_much_is_refused(running: Any, fields: dict[str, Any], param: str) -> None:
    reply = await running.completion(**({"prompt": "hi"} | fields))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert running.engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_many_are_written_beside_the_event_loop(
    running: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[str] = []
    plain = LogprobFormatter.echo

    def noting(self: LogprobFormatter, *arguments: Any, **named: Any) -> Any:
        places.append(threading.current_thread().name)
        return plain(self, *arguments, **named)

    monkeypatch.setattr(LogprobFormatter, "echo", noting)
    for length in (10, 3000):
        fields = {"prompt": "x" * length, "echo": True, "logprobs": 1, "max_tokens": 0}
        reply = await running.completion(**fields, stream=stream)
        assert reply.status_code == 200 and reply.text.count("-120.0") >= length - 1
    few, many = places
    assert few == threading.main_thread().name != many


@pytest.mark.slow
async def test_all_that_are_under_way_together_are_bounded(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(hold_after=0))
    large = {"prompt": ["x" * 1000] * 200, "echo": True, "logprobs": 1, "max_tokens": 0}
    asked = [asyncio.create_task(running.completion(**large)) for _ in range(5)]
    await tools.until(lambda: len(running.engine.requests) == 1000)
    refused = await running.completion(**large)
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "server_error")
    assert "2,000,000" in refused.json()["error"]["message"] and refused.headers["retry-after"]
    running.engine.go.set()
    assert {reply.status_code for reply in await asyncio.gather(*asked)} == {200}
    assert running.app.state.router_state.prompt_logprobs._held == 0
    assert (await running.completion(**large)).status_code == 200


async def test_a_chat_has_at_least_one_token(running: Any) -> None:
    assert (await running.chat(max_tokens=0, prompt_logprobs=1)).status_code == 400

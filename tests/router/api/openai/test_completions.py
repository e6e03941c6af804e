from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from router.generation.plan import derive_seed


async def test_a_completion(running: Any) -> None:
    body = (await running.completion(max_tokens=9)).json()
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "tiny-random")
    nothing = dict.fromkeys(("logprobs", "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs"))
    assert body["choices"] == [{"index": 0, "text": "The quick", "finish_reason": "length", **nothing}]
    details = {"cached_tokens": 0}
    usage = {"prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11, "prompt_tokens_details": details}
    assert body["usage"] == usage


async def test_the_default_is_sixteen_tokens(running: Any) -> None:
    assert (await running.completion()).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [104, 105], [[104, 105]]])
async def test_every_form_of_a_prompt(running: Any, prompt: Any) -> None:
    await running.completion(prompt=prompt)
    assert [list(request.prompt_token_ids) for request in running.engine.requests] == [[104, 105]]


async def test_choices_are_prompt_major(running: Any) -> None:
    body = (await running.completion(prompt=["a", "bc"], n=2, seed=5, echo=True, max_tokens=1)).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "aT"),
        (1, "aT"),
        (2, "bcT"),
        (3, "bcT"),
    ]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 4
    seeds = [request.params.seed for request in sorted(running.engine.requests, key=lambda r: r.request_id)]
    assert seeds == [5, derive_seed(5, 1), 5, derive_seed(5, 1)]


async def test_without_a_seed_every_prompt_gets_its_own(running: Any) -> None:
    await running.completion(prompt=["a", "b"])
    await running.completion()
    assert len({request.params.seed for request in running.engine.requests}) == 3


async def test_ids_are_ours_and_unique(running: Any) -> None:
    for _ in range(2):
        await running.http.post("/v1/completions", json={"prompt": "a", "n": 2}, headers={"x-request-id": "same"})
    assert len({request.request_id for request in running.engine.requests}) == 4


async def test_every_sampling_field_arrives(running: Any) -> None:
    await running.completion(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=-3, max_tokens=20, min_tokens=2, presence_penalty=-1,
        frequency_penalty=2, repetition_penalty=1.5, logit_bias={"65": -100, "66": 3}, logprobs=4, ignore_eos=True,
        stop_token_ids=[7, 7, 8], cache_salt="tenant",
    )  # fmt: skip
    request = running.engine.requests[0]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 7, 0.1, -3)
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.ignore_eos) == (20, 2, 4, True)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-1.0, 2.0, 1.5)
    assert (params.logit_bias, params.stop_token_ids) == (((65, -100.0), (66, 3.0)), (7, 8))
    assert (request.cache_salt, request.deadline_s) == ("tenant", 600.0)


async def test_an_adapter_arrives_by_its_weights_and_its_name(running: Any) -> None:
    adapters = SimpleNamespace(has="sql".__eq__, digest_of=lambda name: "1" * 32)
    running.app.state.router_state.models.default.adapters = adapters
    reply = await running.completion(model="sql")
    assert reply.status_code == 200, reply.text
    (request,) = running.engine.requests
    assert (request.adapter, request.adapter_name) == ("1" * 32, "sql")


async def test_the_goal_of_the_first_token_goes_with_each_request(start: Any) -> None:
    running = await start(slo_ttft_ms=250.0)
    await running.completion()
    assert running.engine.requests[0].ttft_s == 0.25


async def test_nulls_are_defaults_and_unknown_fields_nothing(running: Any) -> None:
    from router.request.fields import CompletionRequest

    fields = dict.fromkeys(set(CompletionRequest.model_fields) - {"prompt"})
    body = (await running.completion(**fields, something_new={"a": [1]})).json()
    assert body["choices"][0]["text"] == "The quick brown "
    params = running.engine.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.logprobs) == (1.0, 1.0, 0, -1)


async def test_top_k_minus_one_is_off(running: Any) -> None:
    await running.completion(top_k=-1)
    assert running.engine.requests[0].params.top_k == 0


async def test_logprobs(running: Any) -> None:
    logprobs = (await running.completion(max_tokens=2, logprobs=2)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["T", "h"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["top_logprobs"][0] == {"a": -1.0, "b": -2.0, "T": -0.5}
    assert logprobs["text_offset"] == [0, 1]


async def test_logprobs_are_numbers_that_json_has(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(logprob=float("nan")))
    assert (await running.completion(max_tokens=1, logprobs=0)).json()["choices"][0]["logprobs"] == {
        "tokens": ["T"], "token_logprobs": [-9999.0], "top_logprobs": [{"T": -9999.0}], "text_offset": [0],
    }  # fmt: skip
    running.engine.logprob = float("-inf")
    body = (await running.completion(max_tokens=1, logprobs=1, return_tokens_as_token_ids=True)).json()
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"token_id:97": -1.0, "token_id:84": -9999.0}]


async def test_parts_of_a_character_are_keys_of_their_own(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(text="é"))
    choice = (await running.completion(max_tokens=2, logprobs=0)).json()["choices"][0]
    assert choice["text"] == "é"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]


async def test_token_ids(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(eos_after=3))
    choice = (await running.completion(return_token_ids=True)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("The", "stop")
    assert choice["token_ids"] == [84, 104, 101, tools.EOS]
    assert choice["prompt_token_ids"] == [104, 105]


async def test_an_end_token_is_shown_on_request(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(eos_after=3))
    fields = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    assert (await running.completion(**fields)).json()["choices"][0]["text"] == "The<|im_end|>"


async def test_an_echo_of_tokens(running: Any) -> None:
    reply = await running.completion(prompt=[[104, 105], [72]], echo=True, max_tokens=3)
    assert [choice["text"] for choice in reply.json()["choices"]] == ["hiThe", "HThe"]


async def test_an_empty_prompt_is_bos(running: Any) -> None:
    await running.completion(prompt="")
    assert list(running.engine.requests[0].prompt_token_ids) == [256]


async def test_cached_tokens_count_once_a_prompt(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(cached=2))
    usage = (await running.completion(prompt=["hi", "ho"], n=3)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_the_model_may_have_several_names(start: Any) -> None:
    running = await start(served_model_name="mine")
    for name in ("mine", "tiny-random"):
        assert (await running.completion(model=name)).json()["model"] == name
    assert (await running.completion(model=None)).json()["model"] == "mine"


async def test_what_fits_is_what_the_workers_take(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(max_model_len=10))
    assert (await running.completion()).json()["usage"]["completion_tokens"] == 8
    assert (await running.completion(max_tokens=8)).status_code == 200
    assert (await running.completion(max_tokens=9)).json()["error"]["code"] == "context_length_exceeded"


async def test_a_trace_is_handed_on_if_it_is_one(running: Any) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for header in (trace, "nonsense"):
        await running.http.post("/v1/completions", json={"prompt": "a"}, headers={"traceparent": header})
    assert [request.traceparent for request in running.engine.requests] == [trace, ""]


async def test_the_fingerprint_is_that_of_the_weights_or_null(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running = await start()
    model = running.app.state.router_state.models.default
    for weights_hash, wanted in (("0123456789abcdef", "fp_0123456789abcdef"), ("", None)):
        monkeypatch.setattr(model, "files", msgspec.structs.replace(model.files, weights_hash=weights_hash))
        assert (await running.completion(max_tokens=2)).json()["system_fingerprint"] == wanted

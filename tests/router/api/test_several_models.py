"""Several models behind one router: scripted engines, each with a text of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from common.errors import Overloaded, Unavailable
from router.access.keys import Limits
from router.cli.router_client import LoadSource

from ..sdk import client_of
from ..several import Start
from .batches.batching import ended, line, lines_in, made
from .test_dashboard import NODE, SEES, browse

KEYS = """
[[key]]
name = "small-only"
key = "a-key-for-the-small-one"
models = ["small"]

[[key]]
name = "chatter"
key = "a-key-for-the-split-alone"
models = ["chat"]

[[key]]
name = "all"
key = "a-key-for-all-of-them"
admin = true
"""
NO_WORKER = (False, "no decode worker is ready (1 configured: decode-0 is silent)")


@pytest.mark.parametrize(
    ("asked", "name", "answer"),
    [
        ("small", "small", "small"),
        ("fast", "small", "small"),
        ("org/small", "org/small", "small"),
        ("large", "large", "large"),
        (None, "small", "small"),
    ],
)
async def test_the_name_finds_the_model(several: Start, asked: str | None, name: str, answer: str) -> None:
    found = await several()
    reply = (await found.ask(asked)).json()
    assert (reply["model"], reply["choices"][0]["text"]) == (name, answer)
    served = found.large if name == "large" else found.small
    assert (len(served.requests), len(found.small.requests) + len(found.large.requests)) == (1, 1)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_an_unknown_model_is_a_404_that_says_what_there_is(several: Start, path: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    fields = {"prompt": "hi"} if path == "/v1/completions" else {"messages": messages}
    fields = {"input": "hi"} if path == "/v1/responses" else fields
    reply = await (await several()).running.http.post(path, json={"model": "huge", "max_tokens": 3} | fields)
    if path == "/v1/responses":  # it has another name for `max_tokens`
        reply = await (await several()).running.http.post(path, json={"model": "huge"} | fields)
    assert reply.status_code == 404, reply.text
    error = reply.json()["error"]
    assert "The model 'huge' does not exist. Available models: 'small', 'fast', 'large', 'chat'" in error["message"]
    if path != "/v1/messages":
        assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_each_model_is_told_by_the_list(several: Start) -> None:
    found = await several()
    listed = await found.listed()
    assert list(listed) == ["small", "fast", "large", "chat"]
    roots = {name: one["root"] for name, one in listed.items()}
    assert roots == {"small": "org/small", "fast": "org/small", "large": "org/large", "chat": "chat"}
    lengths = {name: one["max_model_len"] for name, one in listed.items()}
    assert lengths == {"small": 4096, "fast": 4096, "large": 2048, "chat": 2048}
    one = (await found.running.http.get("/v1/models/fast")).json()
    assert one == listed["fast"]
    assert (await found.running.http.get("/v1/models/huge")).status_code == 404


async def test_the_list_follows_the_pools(several: Start) -> None:
    found = await several(large={"holds": False})
    assert [one["ready"] for one in (await found.listed()).values()] == [True] * 4
    found.small.is_ready = found.large.is_ready = NO_WORKER
    assert {name: one["ready"] for name, one in (await found.listed()).items()} == {
        "small": False, "fast": False, "chat": False
    }  # fmt: skip
    refused = await found.ask("large")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "service_unavailable")
    assert "Model 'large': no decode worker is ready" in refused.json()["error"]["message"]
    found.large.is_ready = (True, "")
    assert (await found.listed())["large"]["ready"]


async def test_anthropics_list_has_pages(several: Start) -> None:
    http = (await several()).running.http
    version = {"anthropic-version": "2023-06-01"}
    page = (await http.get("/v1/models", headers=version)).json()
    assert [one["id"] for one in page["data"]] == ["small", "fast", "large", "chat"]
    page = (await http.get("/v1/models?after_id=fast", headers=version)).json()
    assert ([one["id"] for one in page["data"]], page["first_id"]) == (["large", "chat"], "large")
    page = (await http.get("/v1/models?before_id=large", headers=version)).json()
    assert [one["id"] for one in page["data"]] == ["small", "fast"]


async def test_a_split_divides_users_and_keeps_each_where_it_was(several: Start) -> None:
    found = await several()
    models = {user: {(await found.ask("chat", user=user)).json()["model"] for _ in range(2)} for user in "abcdefgh"}
    assert all(len(one) == 1 for one in models.values())
    assert set.union(*models.values()) == {"small", "large"}


async def test_a_split_draws_for_each_request_without_a_user(several: Start) -> None:
    found = await several()
    assert {(await found.ask("chat")).json()["model"] for _ in range(30)} == {"small", "large"}
    same = {"x-request-id": "one-request"}
    assert len({(await found.ask("chat", headers=same)).json()["model"] for _ in range(5)}) == 1


async def test_a_model_without_workers_falls_back(several: Start) -> None:
    found = await several(small={"fallbacks": ("large",)})
    found.small.is_ready = NO_WORKER
    assert (await found.ask("fast")).json()["model"] == "large"
    assert (
        await found.running.metric('diptych_model_fallbacks_total{engine="router",model_name="small",to="large"') == 1
    )
    assert found.small.num_passed_on == 1  # what scales its pools hears of it
    found.large.full = Overloaded("no room", retry_after_s=1.0)
    assert (await found.ask("fast")).json()["model"] == "small"  # it waits for workers behind a fallback that is full
    found.large.full, found.large.is_ready = None, NO_WORKER
    assert (await found.ask("fast")).json()["model"] == "small"  # as the first of two that may wait
    assert found.small.num_passed_on == 1


@pytest.mark.parametrize("error", [Overloaded("too many", retry_after_s=7.0), Unavailable("full", retry_after_s=7.0)])
async def test_a_model_without_room_falls_back(several: Start, error: Any) -> None:
    found = await several(small={"fallbacks": ("large",)})
    found.small.full = error
    assert (await found.ask("small")).json()["model"] == "large"
    found.large.full = Overloaded("the fallback has none either", retry_after_s=1.0)
    refused = await found.ask("small")
    assert (refused.status_code, refused.json()["error"]["message"]) == (error.status, error.message)
    assert refused.headers["retry-after"] == "7"


async def test_a_model_that_is_full_leaves_the_other_alone(several: Start) -> None:
    found = await several()
    found.small.full = Overloaded("too many", retry_after_s=1.0)
    assert (await found.ask("small")).status_code == 429
    assert (await found.ask("large")).status_code == 200
    assert await found.running.metric('diptych_http_errors_total{engine="router",model_name="small",status="429"') == 1


async def test_a_wrong_request_does_not_fall_back(several: Start) -> None:
    found = await several(small={"fallbacks": ("large",)})
    assert (await found.ask("small", max_tokens=10**6)).status_code == 400
    assert not found.large.requests


async def test_keys_may_use_their_models_only(several: Start, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    found = await several(small={"fallbacks": ("large",)}, api_key_file=str(tmp_path / "keys.toml"))
    small = {"authorization": "Bearer a-key-for-the-small-one"}
    chat = {"authorization": "Bearer a-key-for-the-split-alone"}
    assert list(await found.listed(**small)) == ["small", "fast"]
    assert list(await found.listed(**chat)) == ["chat"]
    assert (await found.ask("fast", headers=small)).status_code == 200
    for model, key in (("large", small), ("chat", small), ("small", chat)):
        refused = await found.ask(model, headers=key)
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "model")
    reply = await found.running.http.post("/tokenize", json={"model": "large", "prompt": "hi"}, headers=small)
    assert reply.status_code == 403
    assert (await found.ask("chat", user="a", headers=chat)).status_code == 200
    found.small.full = Overloaded("too many", retry_after_s=1.0)
    assert (await found.ask("small", headers=small)).status_code == 429  # never the model that it may not use


async def test_errors_list_the_models_of_the_key_only(several: Start, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    found = await several(response_store="memory", api_key_file=str(tmp_path / "keys.toml"))
    reply = await found.running.http.get("/ready?model=huge", headers={"authorization": ""})
    assert (reply.status_code, reply.json()["error"]["message"]) == (404, "The model 'huge' does not exist.")
    async with client_of(found.running, "a-key-for-the-small-one") as sdk:
        lines = [line(f"{i}", model=model, prompt="hi", max_tokens=2) for i, model in enumerate(("huge", "large"))]
        failed, done = [await ended(sdk, await made(sdk, [one])) for one in lines]
        assert failed.errors is not None and failed.errors.data is not None
        problem = "The model 'huge' does not exist. Available models: 'small', 'fast'."
        assert failed.errors.data[0].message == problem
        (refused,) = await lines_in(sdk, done.error_file_id)
        assert refused["response"]["status_code"] == 403
    async with client_of(found.running, "a-key-for-the-split-alone") as sdk:
        done = await ended(sdk, await made(sdk, [line("a", prompt="hi", max_tokens=2)]))
        assert done.model == "chat"


async def test_a_model_has_limits_for_all_keys_together(several: Start) -> None:
    found = await several(small={"limits": Limits(requests_per_minute=2)})
    answers = [(await found.ask("small")).status_code for _ in range(3)]
    assert answers == [200, 200, 429]
    refused = (await found.ask("small")).json()["error"]["message"]
    assert "model 'small': limit 2 requests per minute for all keys together" in refused
    assert (await found.ask("large")).status_code == 200
    line = 'diptych_rate_limited_total{engine="router",key="",limit="model_requests",model_name=""'
    assert await found.running.metric(line) == 2


async def test_a_models_tokens_are_counted_and_given_back(several: Start) -> None:
    found = await several(small={"limits": Limits(tokens_per_minute=100)})
    too_long = await found.ask("small", prompt="x" * 101)
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "rate_limit_exceeded")
    found.small.error = Overloaded("refused late", retry_after_s=1.0)
    assert [(await found.ask("small", prompt="x" * 60)).status_code for _ in range(3)] == [429] * 3
    found.small.error = None
    assert (await found.ask("small", prompt="x" * 60)).status_code == 200
    assert (await found.ask("small", prompt="x" * 60)).status_code == 429


async def test_requests_at_once_are_counted_until_they_end(several: Start, tools: Any) -> None:
    found = await several(small={"limits": Limits(concurrent_requests=1), "fallbacks": ("large",)})
    found.small.hold_after = 1
    held = asyncio.create_task(found.ask("small"))
    await tools.until(lambda: found.small.requests)
    assert (await found.ask("small")).json()["model"] == "large"
    found.small.go.set()
    assert (await held).json()["model"] == "small"
    assert (await found.ask("small")).json()["model"] == "small"


async def test_metrics_show_each_family_once_and_each_model(several: Start) -> None:
    found = await several()
    for model in ("small", "small", "large", "huge"):
        await found.ask(model)
    page = (await found.running.http.get("/metrics")).text
    kinds = [line for line in page.splitlines() if line.startswith("# TYPE ")]
    assert len(kinds) == len(set(kinds))
    success = 'vllm:request_success_total{engine="router",finished_reason="length",model_name='
    assert await found.running.metric(success + '"small"') == 2
    assert await found.running.metric(success + '"large"') == 1
    assert await found.running.metric('diptych_http_errors_total{engine="router",model_name="",status="404"') == 1
    assert page.count("process_resident_memory_bytes ") == 3  # help, type, one sample


async def test_load_is_that_of_all_models_or_of_one(several: Start) -> None:
    found = await several()
    await found.ask("small")
    whole = (await found.running.http.get("/load")).json()
    assert [{name: one[name] for name in ("id", "max_model_len", "ready")} for one in whole["models"]] == [
        {"id": "small", "max_model_len": 4096, "ready": True},
        {"id": "large", "max_model_len": 2048, "ready": True},
    ]
    assert (len(whole["workers"]), whole["stages"]["decode"], whole["server_load"]) == (2, 4, 4)
    assert (whole["classes"][0]["num_waiting"], len(whole["classes"])) == (6, 1)
    one = (await found.running.http.get("/load?model=large")).json()
    assert ([each["id"] for each in one["models"]], len(one["workers"])) == (["large"], 1)
    assert (whole["traffic"]["ttft"]["num"], one["traffic"]["ttft"]["num"]) == (1, 0)
    assert (await found.running.http.get("/load?model=huge")).status_code == 404


async def test_ready_with_one_model_that_is(several: Start) -> None:
    found = await several()
    http = found.running.http
    assert (await http.get("/ready")).json() == {"status": "ready", "detail": ""}
    found.large.is_ready = NO_WORKER
    reply = await http.get("/ready")
    assert (reply.status_code, reply.json()["detail"]) == (200, f"large: {NO_WORKER[1]}")
    assert (await http.get("/ready?model=large")).status_code == 503
    assert (await http.get("/ready?model=fast")).status_code == 200
    found.small.is_ready = NO_WORKER
    assert (await http.get("/ready")).status_code == 503


async def test_every_model_forgets_its_prefixes(several: Start) -> None:
    found = await several()
    await found.running.http.post("/reset_prefix_cache")
    assert (found.small.num_resets, found.large.num_resets) == (1, 1)


@pytest.mark.parametrize("response_store", ["memory"])
async def test_a_response_in_the_background_counts_for_its_model_until_it_ends(several: Start, tools: Any) -> None:
    found = await several(small={"limits": Limits(concurrent_requests=1)})
    found.small.hold_after = 1
    body = {"model": "small", "input": "hi", "background": True, "max_output_tokens": 4}
    made = (await found.running.http.post("/v1/responses", json=body)).json()
    assert (await found.ask("small")).status_code == 429
    found.small.go.set()
    background = found.running.app.state.responses.background
    await tools.until(lambda: background.num_running == 0)
    assert (await found.running.http.get(f"/v1/responses/{made['id']}")).json()["status"] == "incomplete"
    assert (await found.ask("small")).status_code == 200


async def test_a_key_has_limits_at_a_model_of_its_own(several: Start, tmp_path: Path) -> None:
    limited = '\n[[key]]\nname = "limited"\nkey = "a-key-with-limits-by-model"\n'
    limited += "by_model.small = { requests_per_minute = 1 }\n"
    (tmp_path / "keys.toml").write_text(KEYS + limited)
    found = await several(small={"fallbacks": ("large",)}, api_key_file=str(tmp_path / "keys.toml"))
    key = {"authorization": "Bearer a-key-with-limits-by-model"}
    assert (await found.ask("small", headers=key)).json()["model"] == "small"
    refused = await found.ask("fast", headers=key)  # its own limit does not lead to another model
    assert refused.status_code == 429
    assert "key 'limited' at model 'small': limit 1 requests per minute" in refused.json()["error"]["message"]
    assert (await found.ask("large", headers=key)).status_code == 200
    other = {"authorization": "Bearer a-key-for-the-small-one"}
    assert (await found.ask("small", headers=other)).status_code == 200
    line = 'diptych_rate_limited_total{engine="router",key="limited",limit="key_model_requests"'
    assert await found.running.metric(line) == 1


@pytest.mark.slow
@pytest.mark.skipif(NODE is None, reason="node is not installed")
async def test_the_dashboard_shows_all_models_or_one(several: Start) -> None:
    served = await several()
    for model in ("small", "small", "large"):
        assert (await served.ask(model)).status_code == 200
    number = "get('times').children[0].children.at(-1).textContent"
    shown = await browse(
        served.running.url, SEES, ["show", "text('model')"], ["show", "[get('model-row').hidden, text('models')]"],
        ["until", f"{number} === '3'"], ["do", "get('model').value = 'small'; get('model').fire('change')"],
        ["until", f"{number} === '2'"], ["show", "[text('models'), text('model')]"],
        ["show", "asked.map((one) => one.path).findLast((path) => !path.includes('history'))"],
        ["do", "get('model').value = ''; get('model').fire('change')"], ["until", f"{number} === '3'"],
    )  # fmt: skip
    assert shown[0] == "All models | small | large" and shown[1][0] is False
    assert shown[2][0].startswith("small · ") and "large" not in shown[2][0]
    assert shown[2][1] == "All models | small | large" and shown[3] == "/load?model=small"


async def test_top_shows_all_models_or_one(several: Start) -> None:
    served = await several()
    assert (await served.ask("large")).status_code == 200
    numbers = {}
    for model in ("", "small", "large"):
        load = (await asyncio.to_thread(LoadSource.of(served.running.url, model=model).ask)).load
        assert load is not None
        numbers[model] = ([one["id"] for one in load["models"]], load["traffic"]["ttft"]["num"])
    assert numbers == {"": (["small", "large"], 1), "small": (["small"], 0), "large": (["large"], 1)}
    unknown = await asyncio.to_thread(LoadSource.of(served.running.url, model="a b&c").ask)
    assert "The model 'a b&c' does not exist. Available models: 'small', 'fast', 'large', 'chat'." in unknown.problem

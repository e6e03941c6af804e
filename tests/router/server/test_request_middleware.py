from __future__ import annotations

import re
from typing import Any

import pytest

from router.api import pages

KEY = "s3cret-schlüssel"


@pytest.mark.parametrize("path", ["/", "/dashboard", "/docs", "/health", "/ready", "/metrics", "/ping"])
async def test_some_paths_need_no_key(start: Any, path: str) -> None:
    running = await start(api_key=KEY)
    assert (await running.http.get(path)).status_code == 200


async def test_the_dashboard_has_an_old_name_that_needs_no_key(start: Any) -> None:
    running = await start(api_key=KEY)
    reply = await running.http.get("/live")
    assert (reply.status_code, reply.headers["location"]) == (308, "/dashboard")


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer"}, {"authorization": "Bearer wrong"}, {"authorization": "Basic abc"},
     {"x-api-key": ""}, {"x-api-key": "wrong"}, {"authorization": "Bearer \xff"}],
)  # fmt: skip
async def test_the_others_want_it(start: Any, headers: dict[str, str]) -> None:
    running = await start(api_key="right")
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    for path in ("/v1/models", "/load", "/tokenizer_info", "/nope"):
        reply = await running.http.get(path, headers=raw)
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "headers", [{"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}, {"authorization": f"bearer   {KEY}"}]
)
async def test_the_key_opens(start: Any, headers: dict[str, str]) -> None:
    running = await start(api_key=KEY, headers={"accept": "*/*"})
    raw = {name: value.encode() for name, value in headers.items()}
    assert (await running.http.get("/v1/models", headers=raw)).status_code == 200


async def test_the_chat_page_learns_that_it_needs_a_key(start: Any) -> None:
    running = await start(api_key="right")
    page = (await running.http.get("/")).text
    assert page == pages.page(pages.CHAT)
    paths = set(re.findall(r'"(/v1/[^"]+)"', page))
    assert paths == {"/v1/models", "/v1/chat/completions"}
    for path in paths:  # the paths for which the page shows its form
        method, body = ("GET", None) if path == "/v1/models" else ("POST", {"messages": []})
        reply = await running.http.request(method, path, json=body)
        assert reply.status_code == 401 and set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_request_id_comes_back(running: Any) -> None:
    reply = await running.http.get("/v1/models", headers={"x-request-id": "trace/7:a"})
    assert reply.headers["x-request-id"] == "trace/7:a"
    reply = await running.http.get("/nope", headers={"x-request-id": "trace-8"})
    assert reply.headers["x-request-id"] == "trace-8"


@pytest.mark.parametrize("hostile", ["", "a b", "x" * 129, '"; DROP', "ä"])
async def test_a_hostile_request_id_does_not(running: Any, hostile: str) -> None:
    reply = await running.http.get("/v1/models", headers={"x-request-id": hostile.encode()})
    assert len(reply.headers["x-request-id"]) == 32


async def test_a_bug_is_a_500_of_the_one_shape(running: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(type(running.engine), "load", lambda self: 1 / 0)
    reply = await running.http.get("/load")
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    assert "division" not in reply.text

"""Which pages of other origins may read answers."""

from __future__ import annotations

from typing import Any

import pytest

from common.config import RouterConfig
from common.errors import ConfigError

APP, OTHER = "https://app.example.com", "https://other.example.com"
ASKED = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
BODY = {"prompt": "hi", "max_tokens": 2}


def allowed(reply: Any) -> str | None:
    return reply.headers.get("access-control-allow-origin")


async def test_without_origins_no_answer_has_cors_headers(start: Any) -> None:
    running = await start(api_key="the-only-key")
    preflight = await running.http.options("/v1/completions", headers={"origin": APP, **ASKED})
    reply = await running.http.get("/health", headers={"origin": APP})
    assert (preflight.status_code, reply.status_code) == (401, 200)
    for one in (preflight, reply):
        assert not [name for name in (*one.headers, one.headers.get("vary", "")) if "origin" in name.lower()]


async def test_a_listed_origin_reads_answers_errors_and_their_headers(start: Any) -> None:
    running = await start(api_key="the-only-key", allow_origin=(APP, "http://localhost:3000"))
    preflight = await running.http.options("/v1/completions", headers={"origin": APP, **ASKED})
    assert (preflight.status_code, allowed(preflight)) == (204, APP)
    assert preflight.headers["access-control-allow-headers"] == "authorization, *"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    for key, status in (("the-only-key", 200), ("wrong", 401)):
        headers = {"origin": APP, "authorization": f"Bearer {key}"}
        reply = await running.http.post("/v1/completions", json=BODY | {"stream": status == 200}, headers=headers)
        assert (reply.status_code, allowed(reply), reply.headers["vary"]) == (status, APP, "Origin")
        assert reply.headers["access-control-expose-headers"] == "*"
        assert "access-control-allow-credentials" not in reply.headers
    other = await running.http.options("/v1/completions", headers={"origin": OTHER, **ASKED})
    assert (other.status_code, allowed(other), other.headers["vary"]) == (401, None, "Origin")


async def test_any_origin_with_keys(start: Any) -> None:
    running = await start(api_key="the-only-key", allow_origin=("*",))
    reply = await running.http.get("/health", headers={"origin": OTHER})
    assert allowed(reply) == "*" and "vary" not in reply.headers
    assert allowed(await running.http.get("/health")) is None


async def test_a_listed_origin_passes_the_checks_of_loopback_and_rebinding_does_not(start: Any) -> None:
    running = await start(allow_origin=(APP,))
    page = {"origin": APP, "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
    reply = await running.http.post("/v1/completions", json=BODY, headers=page)
    assert (reply.status_code, allowed(reply)) == (200, APP)
    for refused in (page | {"origin": OTHER}, page | {"host": "app.example.com"}):
        assert (await running.http.post("/v1/completions", json=BODY, headers=refused)).status_code == 403


@pytest.mark.parametrize("origin", ["app.example.com", f"{APP}/", f"{APP}/v1", "null", "https://me@app.example.com"])
def test_a_value_that_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"allow_origin=.*must be an origin such as https://app\.example\.com"):
        RouterConfig(decode=("tcp://127.0.0.1:1",), allow_origin=(origin,))


def test_any_origin_needs_keys() -> None:
    with pytest.raises(ConfigError, match="without --api-key or --api-key-file"):
        RouterConfig(decode=("tcp://127.0.0.1:1",), allow_origin=("*",))

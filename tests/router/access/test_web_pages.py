"""What a web page of another site may do at a router that has no keys, and where its checks do not apply."""

from __future__ import annotations

from typing import Any

import pytest

BODY = {"prompt": "hi", "max_tokens": 2}
EVIL = {"origin": "http://evil.example", "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
REBOUND = {"host": "evil.example:8000", "sec-fetch-site": "same-origin"}
ASKED = [
    ("POST", "/v1/completions", {"json": BODY}),
    ("POST", "/reset_prefix_cache", {}),
    ("POST", "/v1/load_lora_adapter", {"json": {"lora_name": "x", "lora_path": "/etc"}}),
    ("POST", "/v1/files", {"files": {"file": ("a", b"{}")}, "data": {"purpose": "batch"}}),
    ("GET", "/v1/files", {}),
    ("GET", "/load", {}),
    ("GET", "/metrics", {}),
    ("GET", "/nowhere", {}),
]


@pytest.fixture
def response_store() -> str:
    return "memory"


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("headers", [EVIL, REBOUND, {"host": "evil.example"}], ids=["another site", "rebound", "host"])
@pytest.mark.parametrize(("method", "path", "sent"), ASKED, ids=lambda value: str(value))
async def test_another_sites_page_gets_nothing(
    running: Any, headers: dict[str, str], method: str, path: str, sent: dict[str, Any]
) -> None:
    reply = await running.http.request(method, path, headers=headers, **sent)
    assert reply.status_code == 403
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and "without API keys" in error["message"]
    assert running.engine.requests == [] and running.engine.num_resets == 0
    assert not (await running.http.get("/v1/files")).json()["data"]


async def test_the_error_has_the_shape_of_the_api(running: Any) -> None:
    reply = await running.http.post("/v1/messages", json={}, headers=EVIL)
    assert reply.status_code == 403 and reply.json()["error"]["type"] == "permission_error"
    assert await running.metric('diptych_http_errors_total{engine="router",model_name="tiny-random",status="403"') == 1


async def test_a_page_needs_the_key(start: Any) -> None:
    """Where a key protects, the host may be that of a proxy, and the page any that has the key."""
    running = await start(api_key="the-only-key")
    for headers in (EVIL, REBOUND):
        assert (await running.http.post("/v1/completions", json=BODY, headers=headers)).status_code == 401
        headers = headers | {"authorization": "Bearer the-only-key"}
        assert (await running.http.post("/v1/completions", json=BODY, headers=headers)).status_code == 200


async def test_other_addresses_have_names_that_the_router_cannot_know(running: Any) -> None:
    """Behind an ingress the host is any, and the probes of a kubelet name the address of the pod."""
    running.app.state.router_state.is_loopback = False
    for headers in (
        REBOUND,
        {"host": "10.0.0.7:8000"},
        {"host": "llm.example.com", "origin": "https://llm.example.com"},
    ):
        assert (await running.http.post("/v1/completions", json=BODY, headers=headers)).status_code == 200

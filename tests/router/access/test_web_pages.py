"""What a web page of another site may do at a router that has no keys, and where its checks do not apply."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from router.access.errors import Forbidden
from router.access.web_pages import check_web_page

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


CROSS = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
VISIT = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


def is_allowed(method: str = "POST", **fields: str) -> bool:
    """Whether a request with these headers is answered; `_` stands for `-`."""
    headers = {"host": "127.0.0.1:8000", "content-type": "application/json"} | fields
    try:
        check_web_page(method, [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()])
    except Forbidden as refusal:
        assert (refusal.status, refusal.type) == (403, "permission_error")
        return False
    return True


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.:8000", "127.0.0.1", "127.1.2.3:80", "[::1]:8000", "0.0.0.0:8000"]
    + ["192.168.1.5:8000", "[fe80::1%eth0]:8000", "8.8.8.8", "diptych.localhost", "box.local:8000", "llm.internal", ""]
    + [socket.gethostname(), f"{socket.gethostname().upper()}:8000"],
)
def test_hosts_of_this_machine(host: str) -> None:
    """An address in the URL of a page cannot be rebound, whichever it is."""
    assert is_allowed(host=host) and is_allowed("GET", host=host)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example:8000", "xlocalhost"]
    + ["notlocal", "local", "internal", "evil.local.example", "2130706433.example", "[evil.example]", "localhost@evil"],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_rebound_hosts(host: str, method: str) -> None:
    assert not is_allowed(method, host=host)
    assert not is_allowed(method, host=host, origin=f"http://{host}", sec_fetch_site="same-origin")


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost",
        "http://localhost:3000",
        "https://localhost:8443",
        "http://127.0.0.1:5173",
        "http://[::1]:3000",
    ]
    + ["http://0.0.0.0:3000", "http://app.localhost:3000", "app://obsidian.md", "file://", "tauri://localhost"]
    + ["vscode-webview://0a1b2c", "vscode-file://vscode-app", "HTTP://LOCALHOST:3000"],
)
def test_origins_of_this_machine(origin: str) -> None:
    """What they send is cross-site to a browser: `localhost` and `127.0.0.1` are two sites."""
    assert is_allowed(origin=origin) and is_allowed(origin=origin, **CROSS)


@pytest.mark.parametrize("host", ["192.168.1.5:8000", "box.local:8000", "llm.internal"])
def test_the_routers_own_pages(host: str) -> None:
    for scheme in ("http", "https"):
        assert is_allowed(host=host, origin=f"{scheme}://{host}", sec_fetch_site="same-origin")
    assert not is_allowed(host=host, origin="http://10.0.0.1:8000")


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "https://evil.example:8000",
        "http://localhost.evil.example",
        "http://127.0.0.1.evil.example",
    ]
    + ["http://evil.example.local", "http://192.168.1.5:8000", "https://evil.localhost.example", "ftp://localhost"]
    + ["chrome-extension://abc", "http://", "localhost", "http://localhost@evil.example"],
)
@pytest.mark.parametrize("method", ["GET", "OPTIONS", "POST"])
def test_foreign_origins(origin: str, method: str) -> None:
    assert not is_allowed(method, origin=origin)
    assert not is_allowed(method, origin=origin, **VISIT)


def test_requests_without_an_origin() -> None:
    """Programs send neither; a page without an address, such as a frame in a sandbox, has the origin `null`."""
    for fields in ({}, {"origin": "null"}, {"origin": ""}):
        assert is_allowed(**fields)
        for site in ("none", "same-origin", "same-site"):
            assert is_allowed(**fields, sec_fetch_site=site)
        assert not is_allowed(**fields, **CROSS) and not is_allowed("GET", **fields, **CROSS)


def test_a_link_on_another_site_leads_to_the_routers_page() -> None:
    assert is_allowed("GET", **VISIT) and is_allowed("HEAD", **VISIT)
    assert not is_allowed("POST", **VISIT), "a form of another site"
    assert not is_allowed("GET", **VISIT | {"sec-fetch-dest": "iframe"})
    assert not is_allowed("GET", host="evil.example", **VISIT)

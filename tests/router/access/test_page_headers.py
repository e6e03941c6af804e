"""A router without keys on a loopback address answers programs and its own pages, and no page of another site."""

from __future__ import annotations

import socket

import pytest

from router.access.errors import Forbidden
from router.access.web_pages import check_web_page

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

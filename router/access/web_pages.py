"""Protection of routers on a loopback address against web pages of other sites in a local user's browser.

A router without API keys on a loopback address trusts every local client. A local browser also sends requests for any
web page it shows: cross-site requests (CSRF), and requests to a host name that the site's DNS server has rebound to
127.0.0.1. The browser reports the site in headers that pages cannot change: `Host`, `Origin`, `Sec-Fetch-Site`.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable

from common.errors import MAX_SHOWN_CHARS
from router.access.errors import Forbidden

LOCAL_DOMAINS = (".localhost", ".local", ".internal")
"""Domains that public DNS servers do not resolve."""
APP_SCHEMES = ("app", "file", "tauri", "vscode-file", "vscode-webview")
"""URL schemes in the origins of installed applications."""
NAMED = frozenset((b"host", b"origin", b"sec-fetch-dest", b"sec-fetch-mode", b"sec-fetch-site"))


def check_web_page(
    method: str, headers: Iterable[tuple[bytes, bytes]], allows: Callable[[str], bool] = lambda origin: False
) -> None:
    """Check the headers of a request to a loopback address. Header names must be in lower case. Raises Forbidden.

    `allows` returns whether the administrator has allowed an origin. It does not affect the check of `Host`. Requests
    of programs pass, because they have no `Origin` and their `Host` is an address or `localhost`.
    """
    found = {name: value.decode("latin-1").lower() for name, value in headers if name in NAMED}
    host, origin = found.get(b"host", ""), found.get(b"origin") or "null"
    if not _is_local(_host_of(host)):
        raise Forbidden(
            f"The host name {host[:MAX_SHOWN_CHARS]!r} is not local. A router without API keys on a loopback address "
            "accepts only localhost, IP addresses, the machine's host name, and names that end in "
            f"{', '.join(LOCAL_DOMAINS)}. Make the proxy send 'Host: localhost', or start the router with an API key."
        )
    if origin == "null":  # a page without an address, or no page
        is_foreign = found.get(b"sec-fetch-site") == "cross-site" and not _is_navigation(method, found)
        origin = "another site"
    else:
        is_foreign = not (_is_own(origin, host) or allows(origin))
    if is_foreign:
        raise Forbidden(
            f"Web pages of {origin[:MAX_SHOWN_CHARS]} cannot use this router. A router without API keys on a loopback "
            "address accepts only pages of this machine. To accept others, start the router with --allow-origin and "
            "their origin, or with an API key."
        )


def _is_navigation(method: str, found: dict[bytes, str]) -> bool:
    """Whether the user followed a link to the router. The linking page cannot read the response."""
    return (
        method in ("GET", "HEAD")
        and found.get(b"sec-fetch-mode") == "navigate"
        and found.get(b"sec-fetch-dest") == "document"
    )


def _is_own(origin: str, host: str) -> bool:
    """Whether an origin is an installed application, a server on a loopback address, or the router itself."""
    scheme, _, authority = origin.partition("://")
    if scheme in APP_SCHEMES:
        return True
    if scheme not in ("http", "https"):
        return False
    name = _host_of(authority)
    address = _address_of(name)
    is_loopback = address is not None and (address.is_loopback or address.is_unspecified)
    return authority == host or is_loopback or name == "localhost" or name.endswith(".localhost")


def _is_local(name: str) -> bool:
    """Whether a host name cannot belong to another site. Addresses cannot be rebound, and browsers never send ""."""
    if name in ("", "localhost", "127.0.0.1") or name.endswith(LOCAL_DOMAINS) or _address_of(name) is not None:
        return True
    return name == socket.gethostname().lower()


def _host_of(authority: str) -> str:
    """Return the host of `host:port`, without the brackets of an IPv6 address and without a trailing dot."""
    name = authority[1:].partition("]")[0] if authority.startswith("[") else authority.partition(":")[0]
    return name.removesuffix(".")


def _address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None

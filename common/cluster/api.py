"""Minimal client of the Kubernetes API over HTTP: get, watch, create, merge-patch."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import httpx
import msgspec

from common import __version__
from common.cluster.access import ClusterAccess
from common.errors import DiptychError

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Timeout of a whole answer, in seconds. Watches have their own."""
MAX_BODY_BYTES = 64 * 1024 * 1024
"""Maximum size of an answer: several pages of a list. Protects against proxies with endless answers."""
MAX_LINE_BYTES = 4 * 1024 * 1024
"""Maximum size of a line. The API server stores objects of up to 1.5 MiB, which are larger as JSON."""
MAX_SHOWN = 300
"""Maximum length of the API server's message in an error."""


class KubernetesError(DiptychError):
    """The API server does not answer, rejects the request, or its answer is invalid.

    `status` is the HTTP status or 0.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class _Status(msgspec.Struct):
    message: str = ""


class KubernetesClient:
    """Client for one event loop. Every method raises KubernetesError and has a deadline.

    The kubelet replaces token and CA while a pod runs. The client reads the token for each request, and the CA when its
    file has changed.
    """

    def __init__(self, access: ClusterAccess, *, timeout_s: float = TIMEOUT_S) -> None:
        self._access, self._timeout_s = access, timeout_s
        self._http: httpx.AsyncClient | None = None
        self._ca_seen: object = None

    async def get(self, path: str, params: Mapping[str, str]) -> bytes:
        """Return the body of an object or a list."""
        async with self._answer("GET", path, self._timeout_s, params=dict(params)) as response:
            return await _read(response, MAX_BODY_BYTES)

    async def watch(
        self, path: str, params: Mapping[str, str], on_line: Callable[[bytes], None], wait_s: float
    ) -> None:
        """Call `on_line` with each line of the answer, until the server ends it or `wait_s` seconds have passed."""
        async with self._answer("GET", path, wait_s, params=dict(params)) as response:
            rest = b""
            async for chunk in response.aiter_bytes():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        on_line(line)
                if len(rest) > MAX_LINE_BYTES:
                    raise KubernetesError(f"a line exceeds {MAX_LINE_BYTES} bytes")

    async def merge_patch(self, path: str, body: object) -> None:
        """Change the named fields of an object."""
        headers = {"content-type": "application/merge-patch+json"}
        content = msgspec.json.encode(body)
        async with self._answer("PATCH", path, self._timeout_s, headers=headers, content=content) as response:
            await _read(response, MAX_BODY_BYTES)

    async def create(self, path: str, body: object) -> None:
        """Create an object in a collection."""
        headers, content = {"content-type": "application/json"}, msgspec.json.encode(body)
        async with self._answer("POST", path, self._timeout_s, headers=headers, content=content) as response:
            await _read(response, MAX_BODY_BYTES)

    async def close(self) -> None:
        """Close all connections."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        wait_s: float,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """Send a request. The body of the response is unread. Every failure is a KubernetesError."""
        try:
            async with asyncio.timeout(wait_s):
                http = await self._connection()
                sent = {"accept": "application/json", **self._authorization(), **(headers or {})}
                async with http.stream(method, path, params=params, headers=sent, content=content) as response:
                    if response.status_code >= 400:
                        raise _refusal(response.status_code, await _read(response, MAX_LINE_BYTES))
                    yield response
        except TimeoutError as error:
            raise KubernetesError(f"no answer from {self._access.url} within {wait_s:g} s") from error
        except httpx.HTTPError as error:
            raise KubernetesError(f"{self._access.url}: {str(error) or type(error).__name__}") from error
        except (OSError, httpx.InvalidURL) as error:  # token or CA is unreadable
            raise KubernetesError(f"{self._access.url}: {error}") from error

    def _authorization(self) -> dict[str, str]:
        """Return the header with the token; empty without a token, as with `kubectl proxy`. Raises OSError."""
        try:
            token = self._access.token_file.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise KubernetesError(f"invalid token in {self._access.token_file}: {error}") from error
        return {"authorization": f"Bearer {token}"}

    async def _connection(self) -> httpx.AsyncClient:
        seen = _version_of(self._access) if self._access.is_https else None
        if self._http is None or seen != self._ca_seen:
            verify: ssl.SSLContext | bool = False
            if self._access.is_https:
                ca = self._access.ca_file
                verify = ssl.create_default_context(cafile=str(ca) if ca.exists() else None)
            await self.close()
            self._http = httpx.AsyncClient(
                base_url=self._access.url,
                verify=verify,
                timeout=httpx.Timeout(self._timeout_s, read=None),  # reads are bounded by the request's deadline
                headers={"user-agent": f"diptych/{__version__}"},
                trust_env=False,
            )
            self._ca_seen = seen
        return self._http


def _version_of(access: ClusterAccess) -> object:
    try:
        found = access.ca_file.stat()
    except FileNotFoundError:
        return ""
    return (found.st_ino, found.st_mtime_ns, found.st_size)


async def _read(response: httpx.Response, limit: int) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > limit:
            raise KubernetesError(f"the answer exceeds {limit} bytes")
    return bytes(body)


def _refusal(status: int, body: bytes) -> KubernetesError:
    """Convert an error response into an exception."""
    try:
        said = msgspec.json.decode(body, type=_Status).message
    except (msgspec.MsgspecError, ValueError):
        said = body.decode("utf-8", "replace")
    hint = {401: "the token was rejected", 403: "the service account lacks permission", 410: "too old"}.get(status, "")
    words = ": ".join(part for part in (f"HTTP {status}", hint, said.strip()[:MAX_SHOWN]) if part)
    return KubernetesError(words, status)

"""Requests of the commands to a router, and where it is. Imports no optional package.

The text of a router is untrusted: what is returned as a problem has no control characters of the terminal.
"""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

from router.cli.models.table import clean

TIMEOUT_S = 5.0
"""Timeout of each network operation: connect, send, read."""
ROUTER_ANSWER_S = 10.0
"""Maximum time for an answer of the router."""
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Maximum size of an answer; a thousand workers need a few MiB."""
NO_KEY = "the router requires an API key: set --api-key or DIPTYCH_API_KEY"
NO_LOAD = "the server is not a Diptych router of this version"


@dataclass(frozen=True)
class Answer:
    """The load, or the reason why it is unavailable."""

    load: dict[str, Any] | None = None
    problem: str = ""


@dataclass(frozen=True)
class Reply:
    """An HTTP response, or the reason why there is none."""

    status: int = 0
    body: bytes = b""
    problem: str = ""
    date: str = ""


class WrongUrl(Exception):
    """The text is not a valid router URL."""


class WrongCaFile(OSError):
    """The file with trusted certificates cannot be used."""


@dataclass(frozen=True)
class LoadSource:
    """A router. `path` is the URL prefix of a proxy. An empty `model` selects all models."""

    host: str
    port: int
    path: str = ""
    tls: bool = False
    key: str = ""
    ca_file: str = ""
    model: str = ""

    @classmethod
    def of(cls, url: str, key: str = "", ca_file: str = "", model: str = "") -> LoadSource:
        """Parse a URL, whose scheme is optional. Raises WrongUrl."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise WrongUrl(f"invalid URL {url}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WrongUrl(f"invalid URL {url}: must be http://HOST:PORT or https://HOST:PORT")
        tls = parts.scheme == "https"
        if port is None:
            port = 443 if tls else 80
        if not key.isprintable():
            raise WrongUrl("invalid API key: must have only printable characters")
        return cls(parts.hostname, port, parts.path.rstrip("/"), tls, key, ca_file, model)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}{self.path}"

    @contextmanager
    def request(
        self, method: str, path: str, body: object = None, timeout_s: float = TIMEOUT_S
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request with `body` as JSON, unless it is None, and yield the response, which is closed at the end.

        `timeout_s` is that of each network operation. Raises OSError, also for `ca_file`, HTTPException, and ValueError
        for a path that cannot be sent.
        """
        connection = self._connect(timeout_s)
        try:
            connection.putrequest(method, self.path + path, skip_accept_encoding=True)
            connection.putheader("Connection", "close")
            if self.key:
                connection.putheader("Authorization", f"Bearer {self.key}".encode())
            data = None if body is None else json.dumps(body).encode()
            if data is not None:
                connection.putheader("Content-Type", "application/json")
                connection.putheader("Content-Length", str(len(data)))
            connection.endheaders(data)
            with connection.getresponse() as reply:
                yield reply
        finally:
            connection.close()

    def get(self, path: str, asked: Mapping[str, str] | None = None) -> Reply:
        """Send a GET request. Errors of the network are returned as a problem."""
        try:
            with self.request("GET", f"{path}?{urlencode(asked)}" if asked else path) as reply:
                return Reply(reply.status, reply.read(MAX_ANSWER_BYTES), date=reply.getheader("date", ""))
        except WrongCaFile as error:
            return Reply(problem=str(error))
        except ssl.SSLCertVerificationError as error:
            return Reply(problem=f"the router's certificate is not trusted ({error.verify_message}): use --ca-file")
        except TimeoutError:
            return Reply(problem=f"the router does not answer within {TIMEOUT_S:g} s")
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "strerror", None) or error or type(error).__name__
            return Reply(problem=f"the router does not answer: {clean(reason)}")

    def ask(self) -> Answer:
        """Request the load. Errors of the network or the server are returned as a problem."""
        reply = self.get("/load", {"model": self.model} if self.model else {})
        return Answer(problem=reply.problem) if reply.problem else _load_of(reply)

    def ask_within(self, seconds: float) -> Answer:
        """Request the load, and return a problem if the complete answer takes longer than `seconds`."""
        answers: list[Answer] = []
        thread = threading.Thread(target=lambda: answers.append(self.ask()), daemon=True)
        thread.start()
        thread.join(seconds)
        return answers[0] if answers else Answer(problem=f"the router does not answer within {seconds:g} s")

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """Return a connection that is opened by its first request. Raises WrongCaFile."""
        if not self.tls:
            return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            trust = ssl.create_default_context(cafile=self.ca_file or None)
        except OSError as error:
            raise WrongCaFile(f"cannot use {self.ca_file}: {error.strerror or error}") from error
        return http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s, context=trust)


def source_of(options: argparse.Namespace, prog: str) -> LoadSource | None:
    """Return the router of `--url`, `--api-key` and `--ca-file`. Prints why one is invalid and returns None."""
    try:
        return LoadSource.of(options.url, options.api_key, options.ca_file)
    except WrongUrl as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return None


def error_message(body: bytes) -> str:
    """Return the message of an error response, "" if it has none."""
    try:
        error = json.loads(body)["error"]
        return clean(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return ""


def refusal_of(reply: Reply) -> str:
    """Describe an error response."""
    if reply.status == 401:
        return NO_KEY
    reason = error_message(reply.body)
    return f"the router answers HTTP {reply.status}{f': {reason}' if reason else ''}"


def _load_of(reply: Reply) -> Answer:
    if reply.status == 403:
        return Answer(problem="this API key has no access to /load: use one with admin = true")
    if reply.status != 200:
        return Answer(problem=refusal_of(reply))
    try:
        load = json.loads(reply.body)
    except ValueError:
        load = None
    if isinstance(load, dict) and "traffic" in load and "workers" in load:
        return Answer(load=load)
    return Answer(problem=NO_LOAD)

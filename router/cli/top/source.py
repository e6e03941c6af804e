"""Asks a router for its load over HTTP, within a deadline."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

TIMEOUT_S = 5.0
"""Of each step of an answer: to connect, to send, to read on."""
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Of an answer: a thousand workers take some MiB."""


@dataclass(frozen=True)
class Answer:
    """The load, or why there is none."""

    load: dict[str, Any] | None = None
    problem: str = ""


class WrongUrl(Exception):
    """The text is no address of a router."""


@dataclass(frozen=True)
class LoadSource:
    """A router. `path` comes before `/load`, for a router behind a proxy; `ca_file` may be empty. Of several models it
    tells the load of one, the `model`, or of all of them."""

    host: str
    port: int
    path: str = ""
    tls: bool = False
    key: str = ""
    ca_file: str = ""
    model: str = ""

    @classmethod
    def of(cls, url: str, key: str = "", ca_file: str = "", model: str = "") -> LoadSource:
        """`url` may lack its scheme. Raises WrongUrl."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise WrongUrl(f"{url!r} is no URL ({error})") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WrongUrl(f"{url!r} is refused: http://HOST:PORT or https://HOST:PORT")
        tls = parts.scheme == "https"
        if port is None:
            port = 443 if tls else 80
        if not key.isprintable():
            raise WrongUrl("the API key has a character that no header may have")
        return cls(parts.hostname, port, parts.path.rstrip("/"), tls, key, ca_file, model)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}{self.path}"

    def ask(self) -> Answer:
        """The load now. Never raises for what a router, or something else at its port, may do."""
        try:
            connection = self._connection()
        except OSError as error:
            return Answer(problem=f"{self.ca_file} cannot be used: {error.strerror or error}")
        try:
            asked = f"?{urlencode({'model': self.model})}" if self.model else ""
            connection.putrequest("GET", f"{self.path}/load{asked}", skip_accept_encoding=True)
            connection.putheader("Connection", "close")
            if self.key:
                connection.putheader("Authorization", f"Bearer {self.key}".encode())
            connection.endheaders()
            reply = connection.getresponse()
            return _read(reply.status, reply.read(MAX_ANSWER_BYTES))
        except ssl.SSLCertVerificationError as error:
            return Answer(problem=f"the router's certificate is not trusted ({error.verify_message}): use --ca-file")
        except TimeoutError:
            return Answer(problem=f"the router does not answer within {TIMEOUT_S:g} s")
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "strerror", None) or error or type(error).__name__
            return Answer(problem=f"the router does not answer: {reason}")
        finally:
            connection.close()

    def ask_within(self, seconds: float) -> Answer:
        """The load now, or a problem once so much time is over, however slowly an answer drips in."""
        answers: list[Answer] = []
        asking = threading.Thread(target=lambda: answers.append(self.ask()), daemon=True)
        asking.start()
        asking.join(seconds)
        return answers[0] if answers else Answer(problem=f"the router does not answer within {seconds:g} s")

    def _connection(self) -> http.client.HTTPConnection:
        if not self.tls:
            return http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        trust = ssl.create_default_context(cafile=self.ca_file or None)
        return http.client.HTTPSConnection(self.host, self.port, timeout=TIMEOUT_S, context=trust)


def _read(status: int, body: bytes) -> Answer:
    if status == 401:
        return Answer(problem="the router wants its API key: --api-key or DIPTYCH_API_KEY")
    if status == 403:
        return Answer(problem="this API key may not read /load: use one with admin = true")
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if status == 200 and isinstance(answer, dict) and "traffic" in answer and "workers" in answer:
        return Answer(load=answer)
    if status == 200:
        return Answer(problem="what answers there is no Diptych router of this version")
    error = answer.get("error") if isinstance(answer, dict) else None
    reason = error.get("message") if isinstance(error, dict) else None
    return Answer(problem=f"the router answers HTTP {status}{f': {reason}' if reason else ''}")

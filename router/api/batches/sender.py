"""Client of `diptych batch`: sends the requests of a batch concurrently and retries until their answers are final.

request ──> 2xx, 4xx ──> result; 401 ends the run
   ^└─ 408, 409, 425, 429, 5xx, no connection: after Retry-After or an exponential backoff ─┐
   └──────────────────────────── until `patience_s` has passed ─────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from router.api.batches.batch_format import AGAIN, FIRST_WAIT_S, LONGEST_WAIT_S, MAX_FAILURES, BatchRequest, BatchResult

REFUSED = 401
"""Status that all other requests would get too. A 403 is about the model, adapter or class of one request."""
CONNECT_S = 10.0
"""Connection timeout. A router that is running accepts connections quickly."""
MAX_PROBLEM_CHARS = 300
"""Maximum length, in characters, of a server's error in the output file."""


class Refused(Exception):
    """The server rejects all requests of this client."""


@dataclass(frozen=True, slots=True)
class SendSettings:
    """`patience_s` limits the time of a request with all its attempts; `answer_s` limits one attempt."""

    url: str
    headers: dict[str, str]
    concurrency: int
    patience_s: float
    answer_s: float
    service_tier: str = ""


class BatchSender:
    """Sends all requests and passes each result to `on_result`."""

    def __init__(self, settings: SendSettings, on_result: Callable[[BatchResult], None]) -> None:
        self._settings, self._on_result = settings, on_result

    async def run(self, requests: Iterator[BatchRequest]) -> None:
        """Send all requests. Raises Refused, and the errors of `requests` and `on_result`."""
        settings = self._settings
        limits = httpx.Limits(max_connections=settings.concurrency)
        timeout = httpx.Timeout(settings.answer_s, connect=CONNECT_S)
        client = httpx.AsyncClient(base_url=settings.url, headers=settings.headers, limits=limits, timeout=timeout)
        async with client:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(settings.concurrency):
                        group.create_task(self._send_all(client, requests))
            except ExceptionGroup as errors:  # one failed, which cancelled the others
                raise errors.exceptions[0] from errors

    async def _send_all(self, client: httpx.AsyncClient, requests: Iterator[BatchRequest]) -> None:
        for request in requests:
            self._on_result(await self._answered(client, request))

    async def _answered(self, client: httpx.AsyncClient, request: BatchRequest) -> BatchResult:
        deadline, wait_s, num_failures = time.monotonic() + self._settings.patience_s, FIRST_WAIT_S, 0
        body = request.body
        if self._settings.service_tier and "service_tier" not in body:
            body = {**body, "service_tier": self._settings.service_tier}
        while True:
            hint_s = 0.0
            try:
                async with asyncio.timeout(self._settings.answer_s):
                    reply = await client.post(request.path, json=body)
            except (httpx.TransportError, TimeoutError) as error:
                result = BatchResult(request.custom_id, 0, problem=_shown(error))
            else:
                result = _result(request.custom_id, reply)
                if reply.status_code == REFUSED:
                    raise Refused(f"HTTP {reply.status_code}: {_message(result.body)}")
                num_failures += reply.status_code == 500
                if reply.status_code not in AGAIN or num_failures >= MAX_FAILURES:
                    return result
                hint_s = _retry_after(reply)
            wait = max(hint_s, wait_s * random.uniform(0.5, 1.0))
            wait_s = min(LONGEST_WAIT_S, 2 * wait_s)
            if time.monotonic() + wait > deadline:
                last = f"HTTP {result.status}: {_message(result.body)}" if result.status else result.problem
                tried = f"gave up after {self._settings.patience_s:,.0f} s; last error: {last}"
                return BatchResult(request.custom_id, 0, problem=tried[:MAX_PROBLEM_CHARS])
            await asyncio.sleep(wait)


def _result(name: str, reply: httpx.Response) -> BatchResult:
    try:
        body = reply.json()
    except ValueError:
        body = reply.text
    return BatchResult(name, reply.status_code, reply.headers.get("x-request-id", ""), body)


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or body)[:MAX_PROBLEM_CHARS]


def _retry_after(reply: httpx.Response) -> float:
    try:
        return min(LONGEST_WAIT_S, max(0.0, float(reply.headers.get("retry-after", "0"))))
    except ValueError:
        return 0.0


def _shown(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:MAX_PROBLEM_CHARS]

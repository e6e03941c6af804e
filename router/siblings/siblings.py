"""Requests to the other processes of a router, through their Unix sockets in the shared folder."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus

import httpx

from common.observe import SharedText
from router.siblings.ledger import MetricsLedger
from router.siblings.part import NOT_OWNED, OWNER, RouterPart

log = logging.getLogger(__name__)

WAIT_S = 2.0
"""Timeout for responses of the others, in seconds. Processes that start or hang are omitted."""
END_S = 35.0
"""Timeout for requests that first end an answer, in seconds."""


class Siblings:
    """Client of the other processes. Use from one event loop. `snapshot` reads the metrics of this process.

    It returns a function that renders them in a thread.
    """

    def __init__(self, part: RouterPart, snapshot: Callable[[], Callable[[], bytes]]) -> None:
        self.part, self.ledger = part, MetricsLedger(part)
        self._snapshot = snapshot
        self._own, self._merged = SharedText(self._create_own, reuse_s=0.0), SharedText(self._merge)
        self._clients = {
            index: httpx.AsyncClient(
                base_url="http://localhost",
                transport=httpx.AsyncHTTPTransport(uds=str(part.socket_of(index))),
                timeout=httpx.Timeout(WAIT_S, read=END_S),
                trust_env=False,
            )
            for index in part.others
        }

    async def metrics(self) -> bytes:
        """Return the metrics of all processes, in Prometheus text format."""
        return await self._merged.get()

    async def own_metrics(self) -> bytes:
        """Return the metrics of this process, in Prometheus text format."""
        return await self._own.get()

    async def ask_all(self, path: str, owner: str = "", **params: str) -> dict[int, bytes]:
        """Send a GET to all other processes. Return the bodies of timely responses, by process number."""
        answers = await asyncio.gather(*(self._ask_one(index, path, owner, params) for index in self._clients))
        return {index: body for index, body in zip(self._clients, answers, strict=True) if body is not None}

    async def ask(self, method: str, path: str, owner: str, params: Mapping[str, str]) -> httpx.Response | None:
        """Return the response of the process that owns the object, or None. The caller reads and closes it."""
        for index, client in self._clients.items():
            request = client.build_request(method, path, params=params, headers=_headers(owner))
            try:
                answer = await client.send(request, stream=True)
            except httpx.TransportError as error:
                log.warning(
                    "router process %d does not respond", index, extra={"sibling": index, "why": _reason(error)}
                )
                continue
            if answer.status_code != NOT_OWNED:
                return answer
            await answer.aclose()
        return None

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(client.aclose() for client in self._clients.values()))

    async def _create_own(self) -> bytes:
        return await asyncio.to_thread(self.ledger.stored, self._snapshot())

    async def _merge(self) -> bytes:
        others = await self.ask_all("/metrics")
        return await asyncio.to_thread(self.ledger.page, await self.own_metrics(), others)

    async def _ask_one(self, index: int, path: str, owner: str, params: Mapping[str, str]) -> bytes | None:
        if not self.part.socket_of(index).exists():  # the process is starting
            return None
        try:
            async with asyncio.timeout(WAIT_S):
                answer = await self._clients[index].get(path, params=params, headers=_headers(owner))
        except (httpx.TransportError, TimeoutError) as error:
            log.warning("router process %d does not respond", index, extra={"sibling": index, "why": _reason(error)})
            return None
        return answer.content if answer.status_code == HTTPStatus.OK else None


def _headers(owner: str) -> list[tuple[bytes, bytes]]:
    return [(OWNER.encode(), owner.encode())]


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__

"""Kubernetes source: lists and watches the EndpointSlices of Services.

    list ─> publish ─> watch, publish at each event ─> a minute has passed, or the watch broke ─> list ...

Every watch begins with a list. A missed event is therefore corrected within a minute, and a watch that is rejected as
too old (410) needs no special case.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping

from common.cluster import KubernetesClient, KubernetesError
from common.errors import backoff_s
from common.wire import Role
from router.fleet.discovery import DiscoveryStatus, Publish
from router.fleet.slices import (
    SERVICE_LABEL,
    EndpointSlice,
    ErrorStatus,
    SliceList,
    SliceStore,
    WatchEvent,
    parse,
)

log = logging.getLogger(__name__)

RELIST_S = 60.0
"""Interval of full lists, in seconds, in case a watch missed a change."""
WATCH_SLACK_S = 5.0
"""A watch that the server has not ended this many seconds after its timeout is treated as a dead connection."""
PAGE_SIZE, MAX_PAGES = 500, 200
"""Slices per page of a list, and maximum number of pages."""
MIN_ROUND_S = 1.0
"""Shorter rounds are delayed like failures, so that a proxy that drops every watch does not cause a request storm."""
BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
"""Delay after the first failed round, which doubles up to the second value, in seconds."""


class KubernetesSource:
    """Publishes the endpoints of the Services. The last ones stay while the API server is unavailable."""

    def __init__(
        self,
        client: KubernetesClient,
        namespace: str,
        services: Mapping[str, Role],
        publish: Publish,
        *,
        relist_s: float = RELIST_S,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.status = DiscoveryStatus("kubernetes", services, clock())
        self._client, self._publish = client, publish
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = f"{SERVICE_LABEL} in ({','.join(sorted(services))})"
        self._relist_s, self._clock, self._chance = relist_s, clock, chance
        self._store = SliceStore(services)
        self._portless: list[str] = []

    async def run(self) -> None:
        """List, watch and publish until cancelled."""
        num_bad_rounds = 0
        try:
            while True:
                began = self._clock()
                listed = await self._round()
                if listed and self._clock() - began >= MIN_ROUND_S:
                    num_bad_rounds = 0
                else:
                    num_bad_rounds += 1
                    await asyncio.sleep(self._backoff_s(num_bad_rounds))
        finally:
            await self._client.close()

    async def _round(self) -> bool:
        """List once and watch. Returns False if the list failed."""
        try:
            version = await self._list()
        except KubernetesError as error:
            self.status.failed(self._explained(error), self._clock())
            return False
        self.status.synced(self._clock())
        try:
            await self._watch(version)
        except KubernetesError as error:
            log.info("discovery (kubernetes): the watch ended, listing again: %s", error)
        return True

    async def _list(self) -> str:
        """List all slices. Returns the resource version to watch from."""
        store = SliceStore(self.status.services)
        params = {"labelSelector": self._selector, "limit": str(PAGE_SIZE)}
        for _ in range(MAX_PAGES):
            page = parse(await self._client.get(self._path, params), SliceList)
            for found in page.items:
                store.put(found)
            if not page.metadata.continued:
                self._store = store
                self._publish_endpoints()
                return page.metadata.resource_version
            params["continue"] = page.metadata.continued
        raise KubernetesError(f"more than {PAGE_SIZE * MAX_PAGES} slices")

    async def _watch(self, version: str) -> None:
        """Process changes after `version` for about a minute."""
        seconds = max(1, round(self._relist_s * (0.75 + self._chance() / 2)))  # jitter between routers
        params = {
            "labelSelector": self._selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }
        await self._client.watch(self._path, params, self._on_line, seconds + WATCH_SLACK_S)

    def _on_line(self, line: bytes) -> None:
        event = parse(line, WatchEvent)
        match event.type:
            case "ADDED" | "MODIFIED":
                self._store.put(parse(event.object, EndpointSlice))
                self._publish_endpoints()
            case "DELETED":
                self._store.remove(parse(event.object, EndpointSlice))
                self._publish_endpoints()
            case "BOOKMARK":
                pass  # the next watch begins with a list
            case "ERROR":
                status = parse(event.object, ErrorStatus)
                raise KubernetesError(f"{status.code} {status.message[:300]}", status.code)
            case _:
                raise KubernetesError(f"the API server sent an event of type {event.type[:50]!r}")

    def _publish_endpoints(self) -> None:
        endpoints = self._store.endpoints()
        self.status.published(endpoints)
        self._publish(endpoints)
        portless = self._store.portless()
        if portless != self._portless:
            self._portless = portless
            if portless:
                log.warning("discovery (kubernetes): Service %s: no port is named 'control'", ", ".join(portless))

    def _explained(self, error: KubernetesError) -> str:
        if error.status == 403:
            return f"{error} (its Role needs list and watch on endpointslices of discovery.k8s.io)"
        return str(error)

    def _backoff_s(self, num_bad_rounds: int) -> float:
        return backoff_s(BACKOFF_S, MAX_BACKOFF_S, num_bad_rounds - 1) * (0.5 + self._chance() / 2)

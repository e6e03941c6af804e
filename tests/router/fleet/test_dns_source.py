"""Host names that are looked up again and again."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence

import pytest

from router.fleet.discovery import Endpoint
from router.fleet.dns_source import DNSSource, resolve

P, D = "p.example:7001", "d.example:7002"


class Names:
    """A resolver whose answers tests change, and what the source made of them."""

    def __init__(self) -> None:
        self.answers: dict[str, list[str] | OSError] = {"p.example": [], "d.example": []}
        self.hanging = asyncio.Event()
        self.hanging.set()
        self.num_lookups = 0
        self.published: list[tuple[Endpoint, ...]] = []
        self.source = DNSSource(
            {P: "prefill", D: "decode"}, self.publish, interval_s=0.01, resolve=self.resolve, timeout_s=0.3
        )
        self.task = asyncio.create_task(self.source.run())

    def publish(self, endpoints: Sequence[Endpoint]) -> None:
        self.published.append(tuple(endpoints))

    async def resolve(self, host: str, port: int) -> list[str]:
        self.num_lookups += 1
        await self.hanging.wait()
        answer = self.answers[host]
        if isinstance(answer, OSError):
            raise answer
        return answer

    @property
    def addresses(self) -> list[str]:
        return [endpoint.address for endpoint in self.published[-1]] if self.published else []

    async def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert not self.task.done() and time.monotonic() < end, (self.published, self.source.status)
            await asyncio.sleep(0.005)

    async def __aenter__(self) -> Names:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_addresses_come_and_go() -> None:
    async with Names() as names:
        names.answers |= {"p.example": ["10.0.0.1"], "d.example": ["10.0.0.2", "10.0.0.3", "10.0.0.2"]}
        expected = (
            Endpoint("decode", "tcp://10.0.0.2:7002"),
            Endpoint("decode", "tcp://10.0.0.3:7002"),
            Endpoint("prefill", "tcp://10.0.0.1:7001"),
        )
        await names.until(lambda: names.published and names.published[-1] == expected)
        names.answers["d.example"] = ["10.0.0.3"]
        await names.until(lambda: names.addresses == ["tcp://10.0.0.3:7002", "tcp://10.0.0.1:7001"])
        assert names.source.status.num_syncs["failed"] == 0


async def test_a_failed_lookup_keeps_what_is_known() -> None:
    async with Names() as names:
        names.answers["d.example"] = ["10.0.0.2"]
        await names.until(lambda: names.addresses == ["tcp://10.0.0.2:7002"])
        names.answers |= {"d.example": socket.gaierror(-2, "Name or service not known"), "p.example": ["10.0.0.1"]}
        await names.until(lambda: "tcp://10.0.0.1:7001" in names.addresses)
        assert "tcp://10.0.0.2:7002" in names.addresses
        assert names.source.status.error == "d.example:7002: Name or service not known"


@pytest.mark.slow
async def test_a_lookup_that_hangs_is_not_begun_again() -> None:
    async with Names() as names:
        await names.until(lambda: names.source.status.num_syncs["ok"])
        names.hanging.clear()
        before = names.num_lookups
        await names.until(lambda: names.source.status.num_syncs["failed"] >= 3)
        assert names.num_lookups <= before + 2 * len(names.source.status.services)
        assert "no answer within 0.3 s" in names.source.status.error
        names.answers["d.example"] = ["10.0.0.9"]
        names.hanging.set()
        await names.until(lambda: names.addresses == ["tcp://10.0.0.9:7002"])


async def test_a_name_of_both_families_is_reached_by_ipv4() -> None:
    async with Names() as names:
        names.answers |= {"p.example": ["fd00::1"], "d.example": ["fd00::2", "10.0.0.2"]}
        await names.until(lambda: names.addresses == ["tcp://10.0.0.2:7002", "tcp://[fd00::1]:7001"])


async def test_the_systems_resolver() -> None:
    assert "127.0.0.1" in await resolve("localhost", 80) or "::1" in await resolve("localhost", 80)
    assert await resolve("127.0.0.1", 80) == ["127.0.0.1"]

"""Ten times more requests than the service can serve: what it takes it serves well, the rest it refuses at once."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
import pytest

from benchmarks.stack import Stack

from .streams import Ask, Client, Heard, answers, plan
from .watch import fetch, memory_mib, settle, until

PATIENCE_S = 90.0
"""An answer or a refusal that takes longer is a hang."""
TIMES_CAPACITY = 10
GROWTH_MIB = 150.0
REFUSALS = (429, 503)


@dataclass
class Outcomes:
    """`other` says what was neither a whole answer nor a refusal that tells when to come again."""

    served: list[Heard] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    refusals: Counter[int] = field(default_factory=Counter)
    other: list[str] = field(default_factory=list)


def asks_of(count: int, seed: int) -> list[Ask]:
    bodies = [ask.body for ask in plan(seed, count, prompt_len=(800, 1200), num_tokens=1)]
    return [Ask({**body, "max_tokens": 200, "ignore_eos": True, "stop": None}) for body in bodies]


async def ask(http: httpx.AsyncClient, body: dict[str, Any], outcomes: Outcomes) -> None:
    heard = Heard(time.perf_counter())
    fields = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    try:
        async with http.stream("POST", "/v1/completions", json=body | fields) as reply:
            heard.status = reply.status_code
            if reply.status_code in REFUSALS:
                await reply.aread()
                assert int(reply.headers["retry-after"]) >= 1
                outcomes.refused_s.append(time.perf_counter() - heard.began_at)
                outcomes.refusals[reply.status_code] += 1
                return
            async for data in reply.aiter_bytes():
                heard.feed(time.perf_counter(), data)
    except (httpx.HTTPError, KeyError, ValueError) as error:
        heard.error = repr(error)
    if heard.complete:
        outcomes.served.append(heard)
    else:
        outcomes.other.append(f"status {heard.status} after {len(heard.token_ids)} tokens: {heard.error}")


async def ask_leanly(client: Client, body: dict[str, Any], outcomes: Outcomes) -> None:
    """As `ask`, for a tenth of the processor time, which is the router's too; headers go unread."""
    heard = await client.ask(Ask(body), salt=body["cache_salt"], patience_s=PATIENCE_S)
    if heard.status in REFUSALS:
        outcomes.refused_s.append(heard.ended_at - heard.began_at)
        outcomes.refusals[heard.status] += 1
    elif heard.complete:
        outcomes.served.append(heard)
    else:
        outcomes.other.append(f"status {heard.status} after {len(heard.token_ids)} tokens: {heard.error}")


async def open_loop(stack: Stack, asks: list[Ask], rate: float, seconds: float) -> Outcomes:
    """`rate` requests a second, whatever becomes of those before."""
    outcomes = Outcomes()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with (
        httpx.AsyncClient(base_url=stack.url, timeout=PATIENCE_S, limits=limits, trust_env=False) as http,
        Client(stack.url) as client,
        asyncio.TaskGroup() as tasks,
    ):
        began = time.perf_counter()
        for turn in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + turn / rate - time.perf_counter()))
            body = {**asks[turn % len(asks)].body, "cache_salt": f"overload {turn}"}
            tasks.create_task(ask_leanly(client, body, outcomes) if turn % 20 else ask(http, body, outcomes))
    return outcomes


async def unloaded_ttft_s(client: Client, asks: list[Ask]) -> float:
    """Median time to the first token of requests that come one at a time."""
    heard = [await client.ask(one, salt="alone") for one in asks]
    return sorted(one.ttft_s for one in heard)[len(heard) // 2]


async def capacity(client: Client, asks: list[Ask], at_once: int) -> float:
    """Requests a second of a closed loop that keeps everything busy."""
    began = time.perf_counter()
    await answers(client, asks, at_once=at_once, salt="capacity")
    return len(asks) / (time.perf_counter() - began)


async def overload(stack: Stack, report: Any, seconds: float, *, bounds: str) -> None:
    asks = asks_of(24, seed=9)
    async with Client(stack.url) as client:
        await answers(client, asks[:8], salt="warm")
        alone_s = await unloaded_ttft_s(client, asks[:10])
        rate = await capacity(client, asks, at_once=12)
    before = {process.name: memory_mib(process) for process in stack.everything}
    outcomes = await open_loop(stack, asks, TIMES_CAPACITY * rate, seconds)
    after = {process.name: memory_mib(process) for process in stack.everything}
    await settle(stack)
    async with Client(stack.url) as client:
        recovered = await client.ask(asks[0], salt="after")

    first = sorted(one.ttft_s for one in outcomes.served)
    refused = sorted(outcomes.refused_s)
    report(
        f"overload for {seconds:g} s, {bounds}",
        [
            ("capacity", f"{rate:.1f} requests/s, offered {TIMES_CAPACITY} times that"),
            ("served", f"{len(first)}, {len(first) / seconds:.1f} a second"),
            ("refused", dict(outcomes.refusals)),
            ("first token alone", f"median {alone_s * 1000:.0f} ms"),
            ("first token overloaded", f"median {_at(first, 0.5)}, p99 {_at(first, 0.99)}"),
            ("their ratio", f"{first[len(first) // 2] / alone_s:.1f}" if first else "-"),
            ("time to a refusal", f"median {_at(refused, 0.5)}, p99 {_at(refused, 0.99)}"),
            ("first token afterwards", f"{recovered.ttft_s * 1000:.0f} ms"),
            ("memory, MiB", ", ".join(f"{name} {before[name]:.0f} to {after[name]:.0f}" for name in before)),
            ("load of the machine", f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"),
        ],
    )
    assert not outcomes.other, f"{len(outcomes.other)}, the first: {outcomes.other[0]}"
    assert outcomes.served and outcomes.refusals
    assert recovered.complete
    assert all(after[name] - before[name] < GROWTH_MIB for name in before), (before, after)


def _at(values: list[float], share: float) -> str:
    return f"{values[min(len(values) - 1, int(share * len(values)))] * 1000:.0f} ms" if values else "-"


async def next_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and head of the next answer on a connection; its body is taken."""
    async with asyncio.timeout(PATIENCE_S):
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))
        return int(head.split()[1]), head.lower()


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(180)
async def test_refusals_come_before_bodies(stacks: Any) -> None:
    """One place in the batch, taken for seconds: who comes next hears so before he has sent what he wants."""
    stack = stacks(1, 1, decode_flags=("--max-num-seqs", "1"), router_flags=("--max-wait-s", "0.1"))
    body = orjson.dumps({"prompt": "again " * 50_000})
    lines = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    head = "\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode()
    asks = [Ask({"prompt": [7] * 100, "ignore_eos": True, "max_tokens": count}) for count in (300, 3000)]
    async with Client(stack.url) as client:
        assert (await client.ask(asks[0])).complete  # what a request takes is known from now on
        running = asyncio.create_task(client.ask(asks[1]))
        await until(lambda: _is_decoding(stack), "the answer is being decoded")
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
        for _ in range(5):
            writer.write(head)
            status, answer = await next_answer(reader)
            assert status == 429 and b"retry-after: " in answer and not running.done()
            writer.write(body + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await next_answer(reader))[0] == 200
        assert (await running).complete
        writer.close()
        await writer.wait_closed()
        assert (await client.ask(asks[0])).complete  # its end made room at once
    await settle(stack)


async def _is_decoding(stack: Stack) -> bool:
    return (await fetch(stack.router, "/load")).json()["stages"]["decode"] > 0


BOUNDS = ("--max-inflight", "24")


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(180)
async def test_a_short_overload(stacks: Any, report: Any) -> None:
    stack = stacks(1, 1, router_flags=BOUNDS)
    await overload(stack, report, 6.0, bounds=" ".join(BOUNDS))


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "bounds", [(), ("--slo-ttft-ms", "2000", "--slo-refuse", "predicted")], ids=["defaults", "slo"]
)
async def test_a_minute_of_overload(stacks: Any, report: Any, bounds: tuple[str, ...]) -> None:
    stack = stacks(1, 1, router_flags=bounds)
    await overload(stack, report, 60.0, bounds=" ".join(bounds) or "defaults")
    stack.stop()

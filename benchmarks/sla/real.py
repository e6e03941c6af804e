"""Loads on real processes of this machine, for the steps that measure them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks.load.arrivals import RateProfile
from benchmarks.load.client import CompletionClient, RequestOptions, ask_server, ask_token_ids
from benchmarks.load.load import Load
from benchmarks.load.summary import RequestRecord
from benchmarks.load.workload import LengthRange, Vocabulary, Workload
from benchmarks.stack import Stack

REQUEST_S, ANSWER_S, LOG_S = 120.0, 10.0, 10.0
NUM_WARM, WARM_INDEX = 12, 10**9
Beside = Callable[[], Awaitable[None]]


def served(
    stack: Stack,
    profile: Callable[[], RateProfile],
    lengths: tuple[str, str],
    *,
    seed: int,
    beside: Beside | None = None,
) -> list[RequestRecord]:
    """Send a load with prompts and answers of these lengths to the first router of a running stack.

    A few requests before warm the stack up; then `profile` is asked for the rates, which may depend on what the workers
    know of themselves by now. `beside` runs from the first request to the last, and is cancelled then.
    """
    with httpx.Client(base_url=stack.url, timeout=ANSWER_S, trust_env=False) as asking:
        server = ask_server(asking, "")
        token_ids = ask_token_ids(asking, server.model)
    input_len, output_len = map(LengthRange.parse, lengths)
    workload = Workload(Vocabulary(token_ids), input_len, output_len, seed)
    client = CompletionClient(stack.url, RequestOptions(server.model, timeout_s=REQUEST_S))
    warm = Load(client, workload, num_requests=NUM_WARM, first_index=WARM_INDEX)
    load = Load(client, workload)

    async def drive() -> None:
        await warm.closed_loop(2)
        watching = asyncio.ensure_future(beside()) if beside else None
        await load.open_loop(profile().arrivals(seed))
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await client.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(drive())
    return load.records


def requests_logged(log: Path, least: int) -> list[dict[str, Any]]:
    """Lines of a router that logs JSON, one for each request with a prediction; waits a little for `least` of them."""
    end = time.monotonic() + LOG_S
    while True:
        found = list(_lines(log))
        if len(found) >= least or time.monotonic() > end:
            return found
        time.sleep(0.2)


def _lines(log: Path) -> Iterator[dict[str, Any]]:
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the last line, half written, or words of a library
        if isinstance(entry, Mapping) and "predicted_ttft_ms" in entry:
            yield dict(entry)

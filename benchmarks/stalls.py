"""What one request does to all others: the worst `/ready` and the worst gap of a running stream while it is served.

Starts `diptych serve` with one prefill and one decode worker for each request anew, or asks a service at `--url`. A
stream runs and `/ready` is asked every 20 ms, while a process of its own sends the request. Nothing is used but HTTP,
so that versions can be put side by side with the file of one of them.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.conditions import conditions
from benchmarks.report import open_console, write_json
from benchmarks.stack import free_port
from benchmarks.time_limit import time_limit
from common.machine.child_process import ChildProcess

PROGRAM: Final = "python -m benchmarks.stalls"
READY_GOAL_S, GAP_GOAL_S = 0.25, 1.0
POLL_S = 0.02
LIMIT_S = 60.0
"""What is not answered by then is given up."""
SETTLE_S = 2.0
"""Watched after the last answer: a stall may outlive the request that made it."""
START_S = 180.0
STOP_S = 10.0
STREAM_TOKENS = 4000
PROMPT_TOKENS = 3900
WORDS = "the quick brown fox jumps over the lazy dog and goes on to the next field "
ROOM = ("--max-inflight", "2048", "--max-wait-s", "600", "--overload-wait-s", "600", "--queue-timeout-s", "600")
"""So that nothing is refused for want of room: what it does to others once it is taken is what is asked here."""

Body = dict[str, Any]
Request = tuple[str, Body]
"""A path and what is posted there."""


@dataclass(frozen=True)
class Offender:
    """Requests that are sent at once; made where they are sent."""

    name: str
    requests: Callable[[], list[Request]]


@dataclass
class Watch:
    """When tokens of a stream came and how long `/ready` took, in seconds of one clock."""

    tokens: list[float] = field(default_factory=list)
    polls: list[tuple[float, float]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def worst_gap(self, start: float, end: float) -> float:
        """The longest silence of the stream that touches these moments; one that has not ended counts till then."""
        times = [*(at for at in self.tokens if at < end), end]
        gaps = [later - at for at, later in zip(times, times[1:], strict=False) if later > start]
        return max(gaps, default=end - start)

    def worst_poll(self, start: float, end: float) -> float:
        """The longest answer to `/ready` that was awaited between these moments."""
        return max((done - asked for asked, done in self.polls if done > start and asked < end), default=end - start)


@dataclass(frozen=True)
class Row:
    """One offender: what it was told, how long that took, and what others felt. `took_s` is 0 without an offender."""

    name: str
    statuses: dict[str, int]
    message: str
    took_s: float
    ready_s: float
    gap_s: float
    broken: list[str]

    @property
    def meets_goal(self) -> bool:
        return self.ready_s < READY_GOAL_S and self.gap_s < GAP_GOAL_S and not self.broken


def text_of(num_bytes: int) -> str:
    return (WORDS * (num_bytes // len(WORDS) + 1))[:num_bytes]


def prompt_of(number: int, num_tokens: int) -> list[int]:
    """Token ids of the vocabulary's middle, the same for the same number only."""
    return [1000 + (number * 7919 + place * 104_729) % 30_000 for place in range(num_tokens)]


def _conversation(num_bytes: int, num_messages: int) -> list[Body]:
    text = text_of(num_bytes // num_messages)
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i in range(num_messages)]


def _completion(prompt: Any, max_tokens: int, **more: Any) -> Request:
    return "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}


def _chat(content: str, **more: Any) -> Request:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 16, **more}


def _schema(schema: Body) -> Body:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def offenders() -> list[Offender]:
    """Each of them stalled a version of this service."""
    number = {"type": "integer", "multipleOf": 99999989}
    return [
        Offender("/tokenize, 0.6 MB", lambda: [("/tokenize", {"prompt": text_of(600_000)})]),
        Offender("3 x /tokenize, 7.5 MB", lambda: [("/tokenize", {"prompt": text_of(7_500_000)})] * 3),
        Offender("/detokenize, 1,000,000 ids", lambda: [("/detokenize", {"tokens": prompt_of(0, 1_000_000)})]),
        Offender(
            "count_tokens, 7 MB in 999 turns",
            lambda: [("/v1/messages/count_tokens", {"messages": _conversation(7_000_000, 999)})],
        ),
        Offender("a chat of 7.5 MB", lambda: [_chat(text_of(7_500_000))]),
        Offender("a schema of 56 bytes", lambda: [_chat("A number.", response_format=_schema(number))]),
        Offender(
            "12 short regexes",
            lambda: [_chat("Letters.", guided_regex=f"(a{{4000}}){{{500 + i}}}") for i in range(12)],
        ),
        Offender(
            "8 prompts x n=128, 3,900 tokens",
            lambda: [_completion([prompt_of(i, PROMPT_TOKENS) for i in range(8)], 2, n=128)],
        ),
        Offender(
            "repetition_penalty, 7,000 tokens, 8 streams",
            lambda: [_completion(prompt_of(9, 7000), 128, n=8, repetition_penalty=1.1)],
        ),
        Offender("n=128, 20 logprobs, 64 tokens", lambda: [_completion(prompt_of(10, 64), 64, n=128, logprobs=20)]),
        Offender(
            "the same, streamed",
            lambda: [_completion(prompt_of(10, 64), 64, n=128, logprobs=20, stream=True)],
        ),
    ]


def send(url: str, name: str, limit_s: float) -> tuple[dict[str, int], str]:
    """How often which status came, "none" for none in time, and the first error's message. Runs in its own process."""
    (offender,) = (one for one in offenders() if one.name == name)
    answers = asyncio.run(_send_all(url, offender.requests(), limit_s))
    message = next((text for status, text in answers if status != "200"), "")
    return dict(Counter(status for status, _ in answers)), message


async def _send_all(url: str, requests: Sequence[Request], limit_s: float) -> list[tuple[str, str]]:
    limits = httpx.Limits(max_connections=len(requests))
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client:
        return await asyncio.gather(*(_send_one(client, path, body, limit_s) for path, body in requests))


async def _send_one(client: httpx.AsyncClient, path: str, body: Body, limit_s: float) -> tuple[str, str]:
    beginning = b""
    try:
        async with asyncio.timeout(limit_s), client.stream("POST", path, json=body) as response:
            async for part in response.aiter_raw():
                beginning += part[: 200 - len(beginning)]
            return str(response.status_code), beginning.decode(errors="replace")
    except TimeoutError:
        return "none", f"no answer within {limit_s:g} s"
    except httpx.TransportError as error:
        return "none", f"{type(error).__name__}: {error}"


async def poll(client: httpx.AsyncClient, watch: Watch) -> None:
    """Asks `/ready` without end."""
    while True:
        asked = time.perf_counter()
        watch.polls.append((asked, float("inf")))
        with suppress(httpx.TransportError):
            await client.get("/ready")
        watch.polls[-1] = asked, time.perf_counter()
        await asyncio.sleep(max(0.0, POLL_S - (time.perf_counter() - asked)))


async def stream(client: httpx.AsyncClient, watch: Watch) -> None:
    """One stream after the other, each of many tokens; a short prompt, found in the caches."""
    _, body = _completion("Once upon a time", STREAM_TOKENS, stream=True)
    while True:
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    watch.broken.append(f"status {response.status_code}")
                    await asyncio.sleep(0.2)
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        watch.tokens.append(time.perf_counter())
                        if '"error"' in line:
                            watch.broken.append(line[:200])
        except httpx.TransportError as error:
            watch.broken.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.2)


async def measure(
    client: httpx.AsyncClient, processes: ProcessPoolExecutor, url: str, name: str, *, limit_s: float, quiet_s: float
) -> Row:
    """What others feel of an offender, or with an empty name of `quiet_s` seconds without one."""
    watch = Watch()
    watching = [asyncio.create_task(job(client, watch)) for job in (stream, poll)]
    try:
        async with asyncio.timeout(limit_s):
            while len(watch.tokens) < 3:  # noqa: ASYNC110 - it is a list that grows
                await asyncio.sleep(POLL_S)
        start = time.perf_counter()
        if name:
            loop = asyncio.get_running_loop()
            statuses, message = await loop.run_in_executor(processes, send, url, name, limit_s)
            took_s = time.perf_counter() - start
            await asyncio.sleep(SETTLE_S)
        else:
            statuses, message, took_s = {}, "", 0.0
            await asyncio.sleep(quiet_s)
        end = time.perf_counter()
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    watch.polls = [(asked, min(done, end)) for asked, done in watch.polls]
    ready_s, gap_s = watch.worst_poll(start, end), watch.worst_gap(start, end)
    return Row(name or "none", statuses, message, took_s, ready_s, gap_s, watch.broken)


async def idle(client: httpx.AsyncClient, limit_s: float) -> None:
    """Wait until the service is ready and serves nothing. Raises TimeoutError."""
    async with asyncio.timeout(limit_s):
        while True:
            with suppress(httpx.TransportError, ValueError, KeyError):
                is_ready = (await client.get("/ready")).status_code == 200
                if is_ready and not (await client.get("/load")).json()["server_load"]:
                    return
            await asyncio.sleep(0.2)


async def measure_at(url: str, name: str, *, limit_s: float, quiet_s: float) -> Row:
    """As `measure`, once the service is ready and idle."""
    context = multiprocessing.get_context("spawn")
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
        with ProcessPoolExecutor(1, context) as processes:
            processes.submit(chosen, ()).result()  # it has imported all that it needs before anything is timed
            await idle(client, START_S)
            row = await measure(client, processes, url, name, limit_s=limit_s, quiet_s=quiet_s)
    print(f"{row.name}: {row.ready_s * 1000:.0f} ms, {row.gap_s * 1000:.0f} ms", flush=True)
    return row


@contextmanager
def serving(model: str, log: Path | None, flags: Sequence[str]) -> Iterator[str]:
    """The URL of a `diptych serve` with one worker of each kind."""
    port = free_port()
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
    service = ChildProcess("diptych serve", log or Path(os.devnull))
    command = [sys.executable, "-P", "-m", "router.local.serve", "--model", model, "--port", str(port)]
    service.launch([*command, "--prefill", "1", "--decode", "1", *flags])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        service.stop(STOP_S)


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    table = Table(title="what others feel of one request", title_justify="left")
    for name in ("request", "answered", "took, s", "worst /ready, ms", "worst gap of a stream, ms", "goal met"):
        table.add_column(name, justify="left" if name in ("request", "answered") else "right")
    for row in rows:
        answered = ", ".join(f"{count} x {status}" for status, count in row.statuses.items()) or "-"
        times = (f"{row.took_s:.1f}" if row.took_s else "-", f"{row.ready_s * 1000:.0f}", f"{row.gap_s * 1000:.0f}")
        met = "yes" if row.meets_goal else f"no: {row.broken[0][:40]}" if row.broken else "no"
        table.add_row(row.name, answered, *times, met)
    console.print(table)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="model to serve")
    parser.add_argument("--url", default="", help="of a running service, instead of one that is started")
    parser.add_argument("--only", nargs="*", default=[], help="requests whose name holds one of these words")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for each request at most")
    parser.add_argument("--quiet-s", type=float, default=10.0, help="seconds without any request, measured first")
    parser.add_argument("--log-dir", type=Path, help="keep what the services write here")
    parser.add_argument("--output", type=Path, help="write the result to this JSON file")
    return parser.parse_args(argv)


def chosen(words: Sequence[str]) -> list[str]:
    """Names of what is measured, "" first: nothing."""
    names = [offender.name for offender in offenders()]
    return ["", *(name for name in names if not words or any(word in name for word in words))]


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)

    rows: list[Row] = []
    for number, name in enumerate(chosen(options.only)):
        log = options.log_dir / f"{number}.log" if options.log_dir else None
        with nullcontext(options.url) if options.url else serving(options.model, log, ROOM) as url:
            job = measure_at(url, name, limit_s=options.limit_s, quiet_s=options.quiet_s)
            rows.append(asyncio.run(job))
    print_rows(open_console(), rows)
    if options.output:
        found = conditions(PROGRAM, argv, model=options.model, url=options.url, limit_s=options.limit_s)
        write_json(options.output, {"conditions": found, "rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    with time_limit(0.0):  # told to end, it ends what it started
        raise SystemExit(main())

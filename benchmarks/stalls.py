"""How one request disturbs all others: the worst `/ready` and the worst gap of a running stream while it is served.

Each request gets a new `diptych serve` with one prefill and one decode worker, or goes to the service at `--url`. A
stream runs and `/ready` is polled every 20 ms, while a process of its own sends the request. The script talks HTTP
only, so one version of it can measure several versions of the service.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console

from benchmarks.load.report import open_console, print_table
from benchmarks.script import run, script_parser, write_result
from benchmarks.stack import free_port
from common.machine.child_process import ChildProcess

PROGRAM: Final = "python -m benchmarks.stalls"
READY_GOAL_S, GAP_GOAL_S = 0.25, 1.0
POLL_S = 0.02
LIMIT_S = 60.0
"""For the answer to each request."""
SETTLE_S = 2.0
"""The watch goes on after the last answer, because a stall may outlive its request."""
START_S = 180.0
STOP_S = 10.0
STREAM_TOKENS = 4000
PROMPT_TOKENS = 3900
WORDS = "the quick brown fox jumps over the lazy dog and goes on to the next field "
ROOM = ("--max-inflight", "2048", "--max-wait-s", "600", "--overload-wait-s", "600", "--queue-timeout-s", "600")
"""Large bounds, so that the service accepts every request and its effect on others shows."""

Body = dict[str, Any]
Request = tuple[str, Body]
"""A path and the body posted to it."""


@dataclass(frozen=True)
class Offender:
    """Requests that are sent at once; the process that sends them makes them."""

    name: str
    requests: Callable[[], list[Request]]


@dataclass
class Watch:
    """Arrival times of a stream's tokens, and begin and end of each `/ready`, in seconds of one clock."""

    tokens: list[float] = field(default_factory=list)
    polls: list[tuple[float, float]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def worst_gap(self, start: float, end: float) -> float:
        """The longest gap of the stream that overlaps the window; one that has not ended counts up to `end`."""
        times = [*(at for at in self.tokens if at < end), end]
        gaps = [later - at for at, later in zip(times, times[1:], strict=False) if later > start]
        return max(gaps, default=end - start)

    def worst_poll(self, start: float, end: float) -> float:
        """The longest `/ready` that overlaps the window."""
        return max((done - asked for asked, done in self.polls if done > start and asked < end), default=end - start)


@dataclass(frozen=True)
class Row:
    """One offender: its statuses and duration, and the worst delays of others. `took_s` is 0 without an offender."""

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
    """Token ids from the middle of the vocabulary; each `number` has its own."""
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
    """Requests that each stalled an earlier version of this service."""
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
    """The count of each status ("none": no answer in time) and the first error's message. Runs in its own process."""
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
    """Poll `/ready` until cancelled."""
    while True:
        asked = time.perf_counter()
        watch.polls.append((asked, float("inf")))
        with suppress(httpx.TransportError):
            await client.get("/ready")
        watch.polls[-1] = asked, time.perf_counter()
        await asyncio.sleep(max(0.0, POLL_S - (time.perf_counter() - asked)))


async def stream(client: httpx.AsyncClient, watch: Watch) -> None:
    """Stream long answers to a short, cached prompt, one after the other, until cancelled."""
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
    """The delays of others beside an offender or, with an empty name, during `quiet_s` seconds without one."""
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
    """Wait until the service is ready and has no request. Raises TimeoutError."""
    async with asyncio.timeout(limit_s):
        while True:
            with suppress(httpx.TransportError, ValueError, KeyError):
                is_ready = (await client.get("/ready")).status_code == 200
                if is_ready and not (await client.get("/load")).json()["server_load"]:
                    return
            await asyncio.sleep(0.2)


async def measure_at(url: str, name: str, *, limit_s: float, quiet_s: float) -> Row:
    """Call `measure` once the service is ready and idle."""
    context = multiprocessing.get_context("spawn")
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
        with ProcessPoolExecutor(1, context) as processes:
            processes.submit(chosen, ()).result()  # it has imported everything before the measurement starts
            await idle(client, START_S)
            row = await measure(client, processes, url, name, limit_s=limit_s, quiet_s=quiet_s)
    print(f"{row.name}: {row.ready_s * 1000:.0f} ms, {row.gap_s * 1000:.0f} ms", flush=True)
    return row


@contextmanager
def serving(model: str, log: Path | None, flags: Sequence[str]) -> Iterator[str]:
    """Run `diptych serve` with one worker of each kind; yields its URL."""
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
    columns = ("request", "answered", "took, s", "worst /ready, ms", "worst gap of a stream, ms", "goal met")
    shown = []
    for row in rows:
        answered = ", ".join(f"{count} x {status}" for status, count in row.statuses.items()) or "-"
        times = (f"{row.took_s:.1f}" if row.took_s else "-", f"{row.ready_s * 1000:.0f}", f"{row.gap_s * 1000:.0f}")
        met = "yes" if row.meets_goal else f"no: {row.broken[0][:40]}" if row.broken else "no"
        shown.append((row.name, answered, *times, met))
    print_table(console, "delays of others beside one request", columns, shown, left=(0, 1))


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, __doc__, model="model to serve")
    parser.add_argument("--url", default="", help="measure this running service instead of starting one")
    parser.add_argument("--only", nargs="*", default=[], help="only requests whose name contains one of these words")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="most seconds for each request")
    parser.add_argument("--quiet-s", type=float, default=10.0, help="seconds without any request, measured first")
    parser.add_argument("--log-dir", type=Path, help="keep the services' logs here")
    return parser.parse_args(argv)


def chosen(words: Sequence[str]) -> list[str]:
    """Names of the offenders to measure; first "", for none."""
    names = [offender.name for offender in offenders()]
    return ["", *(name for name in names if not words or any(word in name for word in words))]


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    rows: list[Row] = []
    for number, name in enumerate(chosen(options.only)):
        log = options.log_dir / f"{number}.log" if options.log_dir else None
        with nullcontext(options.url) if options.url else serving(options.model, log, ROOM) as url:
            job = measure_at(url, name, limit_s=options.limit_s, quiet_s=options.quiet_s)
            rows.append(asyncio.run(job))
    print_rows(open_console(), rows)
    more = {name: getattr(options, name) for name in ("model", "url", "limit_s")}
    write_result(options, PROGRAM, argv, {"rows": [asdict(row) for row in rows]}, **more)
    return 0


if __name__ == "__main__":
    run(main)

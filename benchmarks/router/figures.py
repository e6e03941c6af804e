"""The figures of one arm. Rates count answers and tokens that clients received; CPU seconds are those of the server."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchmarks.router.arm import Arm
from benchmarks.router.floors import at_random, evenly_spaced
from benchmarks.router.steps import Pace
from benchmarks.router.tally import ANSWERS, ENDED, EVENTS, FAILED, STARTED, TOKENS
from benchmarks.stack import StackError

WAIT_S: Final = 120.0
"""Of the long prompts."""
STALL_S: Final = 60.0
"""Streams begin and end one after the other: this long without another one ends the run."""
POLL_S: Final = 0.01
SETTLE_S: Final = 0.5
WORDS: Final = "the quick brown fox jumps over the lazy dog and goes on to the next field "
SHORT_CHARS, SHORT_TOKENS = 400, 4
STEPS: Final = (1, 4, 16, 64, 250)
"""Streams that get a token in one step: 250 are all of an engine, fewer those of many engines with small batches."""
ALL: Final = 1 << 40
"""More requests than any run sends."""
Figures = dict[str, float]
Request = tuple[bytes, tuple[bytes, bytes]]


class Lost(Exception):
    """Tokens that the source made did not all arrive, or requests failed."""


@dataclass(frozen=True)
class Size:
    """How much is measured. Times in seconds; `long_tokens` are those of the long prompt."""

    streams: int = 1000
    seconds: float = 5.0
    connections: int = 32
    idle: int = 10_000
    long_tokens: int = 100_000
    long_prompts: int = 3
    beside_streams: int = 200
    beside_rate: float = 4000.0
    large_bytes: int = 220_000
    large_connections: int = 4
    steps: tuple[int, ...] = STEPS


QUICK: Final = Size(20, 0.5, 4, 50, 2000, 1, 10, 200.0, 20_000, 2, (1, 5))


class Bench:
    """Measures one arm, figure by figure. Raises Lost, and StackError when something does not come in time."""

    def __init__(self, arm: Arm, size: Size, chars_per_token: float) -> None:
        self._arm, self._size, self._chars_per_token = arm, size, chars_per_token
        self._source, self._clients = arm.source, arm.clients

    # ------------------------------------------------------------ figures

    def streaming(self) -> Figures:
        """Streamed tokens as fast as clients read them, half a round ahead, so that hardly any are joined."""
        with self._running(min(self._size.streams, self._arm.most_streams)):
            self._pace(Pace.READ)
            time.sleep(SETTLE_S)
            tokens, events, cpu_s, began = self._total(TOKENS), self._total(EVENTS), self._arm.cpu_s, time.monotonic()
            time.sleep(self._size.seconds)
            took, cpu_s = time.monotonic() - began, self._arm.cpu_s - cpu_s
            tokens, events = self._total(TOKENS) - tokens, self._total(EVENTS) - events
        return {
            "tokens_per_s": tokens / took,
            "tokens_per_cpu_s": tokens / max(cpu_s, 1e-9),
            "events_per_token": events / max(tokens, 1),
        }

    def latency(self, tokens_per_s: float) -> Figures:
        """From the source's stamp to the client's receipt, at this rate, in steps of so many streams each."""
        step_s, windows, figures = self._size.streams / tokens_per_s, [], Figures()
        with self._running(self._size.streams, record=True):
            for most in self._size.steps:
                self._pace(Pace.CLOCK, step_s, most)
                time.sleep(SETTLE_S)
                began, cpu_s, main_s = time.monotonic(), self._arm.cpu_s, self._arm.main_thread_s
                time.sleep(self._size.seconds)
                ended, cpu_s, main_s = time.monotonic(), self._arm.cpu_s - cpu_s, self._arm.main_thread_s - main_s
                windows.append((began, ended, cpu_s, main_s))
            self._pace(Pace.HOLD)
            time.sleep(SETTLE_S)
            for most, (began, ended, cpu_s, main_s) in zip(self._size.steps, windows, strict=True):
                delays, took = self._delays([(began, ended)]), ended - began
                figures |= self._of_steps(most, delays, took, main_s) | {f"step{most}_cpu_share": cpu_s / took}
        return figures

    def _of_steps(self, most: int, delays: Any, took: float, main_s: float) -> Figures:
        """Added latency in steps of `most` streams beside the floors: each process has its share of a step."""
        servers, num = self._arm.num_serving, len(delays)
        work_s = main_s / max(num, 1)
        evenly = evenly_spaced(most / servers, work_s)
        at_once = at_random(most / servers, work_s, num / took / servers)
        return {
            f"step{most}_at_tokens_per_s": num / took,
            f"step{most}_work_us": 1e6 * work_s,
            f"step{most}_p50_ms": 1e3 * _quantile(delays, 0.5),
            f"step{most}_floor_p50_ms": 1e3 * evenly.p50_s,
            f"step{most}_p99_ms": 1e3 * _quantile(delays, 0.99),
            f"step{most}_floor_p99_ms": 1e3 * evenly.p99_s,
            f"step{most}_random_p99_ms": 1e3 * at_once.p99_s,
        }

    def short(self) -> Figures:
        """Whole answers of a few tokens to prompts of a hundred."""
        self._pace(Pace.ONCE)
        request = self._request(self._text(SHORT_CHARS), SHORT_TOKENS, stream=False)
        found, answers = self._loops(self._size.connections, request, self._size.seconds)
        return {
            "requests_per_s": answers["per_s"],
            "requests_per_cpu_s": answers["per_cpu_s"],
            "request_p50_ms": 1e3 * _quantile(np.array([end - begin for begin, end in found]), 0.5),
        }

    def large(self) -> Figures:
        """Prompts of `large_bytes` bytes, one after the other on a few connections."""
        self._pace(Pace.ONCE)
        request = self._request(self._text(self._size.large_bytes), 1, stream=False)
        _, answers = self._loops(self._size.large_connections, request, self._size.seconds)
        return {"large_per_s": answers["per_s"], "large_per_cpu_s": answers["per_cpu_s"]}

    def turns(self) -> Figures:
        """Conversations of as many bytes, which go on with another question each time."""
        self._pace(Pace.ONCE)
        past = (
            {"role": "user", "content": self._text(self._size.large_bytes)},
            {"role": "assistant", "content": "Ok."},
        )
        request = self._request("?", 1, stream=False, past=past)
        _, answers = self._loops(self._size.large_connections, request, self._size.seconds)
        return {"turns_per_s": answers["per_s"], "turns_per_cpu_s": answers["per_cpu_s"]}

    def long(self) -> Figures:
        """A very long prompt beside streams: its time, and the delays of their tokens meanwhile and before."""
        size = self._size
        with self._running(size.beside_streams, record=True):
            self._pace(Pace.CLOCK, size.beside_streams / size.beside_rate)
            time.sleep(SETTLE_S)
            began = time.monotonic()
            time.sleep(min(2.0, size.seconds))
            quiet = (began, time.monotonic())
            self._source.ask("report")  # which forgets the longest prompt so far
            request = self._request(self._text(int(size.long_tokens * self._chars_per_token)), 1, stream=False)
            found, _ = self._loops(1, request, WAIT_S, most=size.long_prompts, one_client=True)
            before, during = self._delays([quiet]), self._delays(found)
            longest = self._source.ask("report")["longest_prompt"]  # before the streams' end asks and so forgets it
        return {
            "long_s": float(np.median([end - begin for begin, end in found])),
            "long_tokens": float(longest),
            "others_p99_before_ms": 1e3 * _quantile(before, 0.99),
            "others_p99_ms": 1e3 * _quantile(during, 0.99),
            "others_worst_ms": 1e3 * float(during.max(initial=0.0)),
        }

    def idle(self) -> Figures:
        """Streams that have their first token and wait for the next: the memory of each."""
        with self._running(min(20, self._size.idle)):  # what the first streams make once
            pass
        before = self._arm.rss_kib
        with self._running(self._size.idle):
            time.sleep(SETTLE_S)
            began, cpu_s = time.monotonic(), self._arm.cpu_s
            time.sleep(min(3.0, self._size.seconds))
            share = (self._arm.cpu_s - cpu_s) / (time.monotonic() - began)
            after = self._arm.rss_kib
        return {"idle_streams": self._size.idle, "idle_kib": (after - before) / self._size.idle, "idle_share": share}

    # ------------------------------------------------------------ inside

    @contextmanager
    def _running(self, num: int, *, record: bool = False) -> Iterator[None]:
        """Streams that run inside the block, and get their last tokens at its end."""
        ended = self._total(ENDED)
        self._open(num, record)
        yield
        self._end(num, ended)

    def _open(self, num: int, record: bool) -> None:
        self._pace(Pace.HOLD)
        head, (first, last) = self._request(self._text(SHORT_CHARS), self._arm.stream_tokens, stream=True)
        body = b"".join((first, b"00000000", last))
        request = b"%b%d\r\n\r\n%b" % (head, len(body), body)
        began = self._total(STARTED)
        for number, client in enumerate(self._clients):
            share = len(range(number, num, len(self._clients)))
            client.ask("streams", self._arm.port, share, request, record)
        self._wait(STARTED, began, num, "streams began")

    def _end(self, num: int, ended: int) -> None:
        """Give each stream its last token. Raises Lost unless every token arrived, and every answer ended.

        Clients of a source that is not paced leave.
        """
        if self._arm.paced:
            self._source.ask("finish")
            self._wait(ENDED, ended, num, "streams ended")
            emitted, received = self._source.ask("report")["num_emitted"], self._total(TOKENS)
            if emitted != received:
                raise Lost(f"{emitted:,} tokens were made, {received:,} arrived")
        for client in self._clients:
            client.ask("stop")

    def _loops(
        self, num: int, request: Request, seconds: float, *, most: int = ALL, one_client: bool = False
    ) -> tuple[list[tuple[float, float]], Figures]:
        """When each request began and ended, and the rates of `most` of them, or of those within `seconds`."""
        head, body = request
        clients = self._clients[:1] if one_client else self._clients
        answers = self._total(ANSWERS)
        for client in clients:
            client.ask("loop", self._arm.port, max(1, num // len(clients)), most, head, body)
        if most == ALL:
            time.sleep(SETTLE_S)
        first, cpu_s, began = self._total(ANSWERS), self._arm.cpu_s, time.monotonic()
        deadline = began + seconds
        while time.monotonic() < deadline and self._total(ANSWERS) + self._total(FAILED) - answers < most:
            time.sleep(POLL_S)
        took, cpu_s, last = time.monotonic() - began, self._arm.cpu_s - cpu_s, self._total(ANSWERS)
        found = [one for client in clients for one in client.ask("stop" if most == ALL else "seconds")]
        if self._total(FAILED):
            raise Lost(f"{self._total(FAILED):,} answers failed")
        return found, {"per_s": (last - first) / took, "per_cpu_s": (last - first) / max(cpu_s, 1e-9)}

    def _delays(self, windows: list[tuple[float, float]]) -> Any:
        """Seconds from stamp to receipt of each token that the source made within one of the windows: [tokens]."""
        made = self._source.ask("times")
        delays: list[float] = []
        received = {name: times for client in self._clients for name, times in client.ask("times").items()}
        for name, stamps in made.items():
            times, counts = received.get(name, ((), ()))
            arrivals = itertools.chain.from_iterable(map(itertools.repeat, times, counts))
            for stamp, arrival in zip(stamps, arrivals, strict=False):
                if any(begin <= stamp < end for begin, end in windows):
                    delays.append(arrival - stamp)
        return np.array(delays)

    def _request(self, text: str, max_tokens: int, *, stream: bool, past: Sequence[Mapping[str, str]] = ()) -> Request:
        """The head up to the value of its length, and the body before and behind eight digits."""
        messages = [*past, {"role": "user", "content": f"00000000 {text}"}]
        fields = {"model": self._arm.model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        body = json.dumps(fields | ({"stream": True} if stream else {})).encode()
        first, _, last = body.partition(b"00000000")
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        return head + b"Content-Length: ", (first, last)

    @staticmethod
    def _text(num_chars: int) -> str:
        return (WORDS * (num_chars // len(WORDS) + 1))[:num_chars]

    def _pace(self, pace: Pace, step_s: float = 0.0, most: int = 0) -> None:
        self._source.ask("pace", pace.value, step_s, most)

    def _total(self, field: int) -> int:
        return self._arm.tally.total(field)

    def _wait(self, field: int, before: int, num: int, what: str) -> None:
        """Wait until a field of the tally has grown by `num`. Raises Lost when answers fail, StackError when it stalls.

        The deadline begins anew with each that is counted: how long ten thousand take depends on the machine.
        """
        counted, deadline = 0, time.monotonic() + STALL_S
        while counted < num:
            if failed := self._total(FAILED):
                raise Lost(f"{counted:,} of {num:,} {what}, {failed:,} answers failed")
            if (now := self._total(field) - before) > counted:
                counted, deadline = now, time.monotonic() + STALL_S
            elif time.monotonic() > deadline:
                raise StackError(f"{counted:,} of {num:,} {what}, no other one within {STALL_S:g} s")
            time.sleep(POLL_S)


def _quantile(values: Any, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else 0.0

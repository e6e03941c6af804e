"""Streamed completions as a client hears them, and whether two of them are the same answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import orjson

from benchmarks.load.http_stream import ConnectionLost, HttpPool

MODEL = "tiny-random"
VOCAB_SIZE = 256
SHARED_PREFIX_LEN = 256
LOGPROB_TOLERANCE = 1e-3
PATIENCE_S = 180.0


@dataclass(frozen=True)
class Ask:
    """One request. `leaves_after`: its client goes away after so many tokens."""

    body: dict[str, Any]
    leaves_after: int | None = None


@dataclass
class Heard:
    """What came back. Times are perf_counter seconds; `tokens_at` has one for each token."""

    began_at: float
    status: int = 0
    token_ids: list[int] = field(default_factory=list)
    tokens_at: list[float] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    num_completion_tokens: int = -1
    error: str = ""
    left: bool = False
    ended_at: float = 0.0
    _unread: bytes = b""
    _done: bool = False

    @property
    def complete(self) -> bool:
        return self.status == 200 and self._done and bool(self.finish_reason) and not self.error

    @property
    def ttft_s(self) -> float:
        return self.tokens_at[0] - self.began_at

    def feed(self, at: float, data: bytes) -> None:
        """A piece of the event stream."""
        *events, self._unread = (self._unread + data).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                self._take(at, event[6:])

    def _take(self, at: float, payload: bytes) -> None:
        if payload == b"[DONE]":
            self._done = True
            return
        event = orjson.loads(payload)
        if "error" in event:
            self.error = event["error"]["message"]
        if event.get("usage"):
            self.num_completion_tokens = event["usage"]["completion_tokens"]
        for choice in event.get("choices", ()):
            self.text += choice["text"]
            fresh = choice.get("token_ids") or []
            self.token_ids += fresh
            self.tokens_at += [at] * len(fresh)
            if choice.get("logprobs"):
                found = choice["logprobs"]["token_logprobs"]
                self.logprobs += [value for value in found if value is not None]  # the first token of an echo has none
            self.finish_reason = choice["finish_reason"] or self.finish_reason


def plan(seed: int, count: int, *, prompt_len: tuple[int, int] = (10, 1500), num_tokens: int = 300) -> list[Ask]:
    """Short and long, greedy and seeded, some with log-probabilities or stop strings, some whose client leaves."""
    source = random.Random(seed)
    shared = [source.randrange(VOCAB_SIZE) for _ in range(SHARED_PREFIX_LEN)]
    asks = []
    for index in range(count):
        low, high = prompt_len
        length = round(low * (high / low) ** source.random())
        prompt = [source.randrange(VOCAB_SIZE) for _ in range(length)]
        if length > SHARED_PREFIX_LEN and source.random() < 0.2:
            prompt[:SHARED_PREFIX_LEN] = shared
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": source.randint(1, num_tokens), "temperature": 0}
        body["ignore_eos"] = source.random() < 0.8
        if index % 2:
            body |= {"temperature": 1.0, "seed": source.randrange(2**31), "top_p": source.choice((1.0, 0.9))}
        if source.random() < 0.2:
            body["presence_penalty"] = 0.5
        if source.random() < 0.25:
            body |= {"logprobs": 2, "echo": source.random() < 0.5}
        if source.random() < 0.2:
            body["stop"] = ["".join(source.choices("etaoinsh", k=2)) for _ in range(3)]
        leaves = source.random() < 0.1
        asks.append(Ask(body, source.randint(1, body["max_tokens"]) if leaves else None))
    return asks


class Client:
    """Asks one router. A context: connections end with it."""

    def __init__(self, url: str) -> None:
        self._pool = HttpPool(url)

    async def ask(self, ask: Ask, *, salt: str = "", patience_s: float = PATIENCE_S) -> Heard:
        """The answer, or as much of it as came. Nothing that a server does raises."""
        heard = Heard(time.perf_counter())
        fields = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        body = orjson.dumps({**fields, "cache_salt": salt, **ask.body})
        refusal: list[bytes] = []

        def on_body(at: float, data: bytes) -> None:
            heard.feed(at, data)
            if ask.leaves_after is not None and len(heard.token_ids) >= ask.leaves_after:
                heard.left = True
                post.cancel()

        post = asyncio.ensure_future(
            self._pool.post("/v1/completions", body, on_body, lambda _, data: refusal.append(data))
        )
        try:
            async with asyncio.timeout(patience_s):
                heard.status = await post
        except asyncio.CancelledError:
            if not heard.left:
                raise
        except TimeoutError:
            heard.error = f"nothing for {patience_s:g} s"
        except (ConnectionLost, OSError) as error:
            heard.error = f"connection: {error}"
        if refusal:
            heard.error = orjson.loads(b"".join(refusal))["error"]["message"]
        heard.ended_at = time.perf_counter()
        return heard

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()


async def answers(client: Client, asks: Sequence[Ask], *, at_once: int = 8, salt: str = "") -> list[Heard]:
    """Every ask's whole answer, by clients that stay."""
    gate = asyncio.Semaphore(at_once)

    async def one(ask: Ask) -> Heard:
        async with gate:
            return await client.ask(Ask(ask.body), salt=salt)

    heard = list(await asyncio.gather(*(one(ask) for ask in asks)))
    failed = [one.error or f"status {one.status}" for one in heard if not one.complete]
    assert not failed, f"{len(failed)} of {len(heard)} undisturbed requests failed, the first: {failed[0]}"
    return heard


def difference(heard: Heard, expected: Heard) -> str:
    """How an answer differs from the undisturbed one; "" when it does not. Of one that was left, what came counts."""
    if heard.left:
        num = len(heard.token_ids)
        return "" if heard.token_ids == expected.token_ids[:num] else f"other tokens before it was left at {num}"
    if not heard.complete:
        what = heard.error or f"ended without a reason, status {heard.status}"
        return f"failed after {len(heard.token_ids)} of {len(expected.token_ids)} tokens: {what}"
    if heard.token_ids != expected.token_ids:
        at = next(
            (i for i, (a, b) in enumerate(zip(heard.token_ids, expected.token_ids, strict=False)) if a != b),
            min(len(heard.token_ids), len(expected.token_ids)),
        )
        return f"token {at} of {len(expected.token_ids)} is another"
    if (heard.text, heard.finish_reason) != (expected.text, expected.finish_reason):
        return f"the same tokens, but text or reason differ: {heard.finish_reason!r}, {expected.finish_reason!r}"
    if heard.num_completion_tokens != expected.num_completion_tokens:
        return f"usage says {heard.num_completion_tokens} tokens instead of {expected.num_completion_tokens}"
    if len(heard.logprobs) != len(expected.logprobs):
        return f"{len(heard.logprobs)} log-probabilities instead of {len(expected.logprobs)}"
    off = max((abs(a - b) for a, b in zip(heard.logprobs, expected.logprobs, strict=True)), default=0.0)
    return f"a log-probability is off by {off:g}" if off > LOGPROB_TOLERANCE else ""

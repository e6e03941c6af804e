"""The rate limits of one key, as a pure policy of the time. Each of several routers grants them; the processes of one
router grant them together (`router.access.shared_limits`).

A request counts when it arrives, a prompt when it is tokenised, output as it is generated. A stream may overdraw its
key's tokens: it continues, and the next request waits until the level is above zero again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.access.keys import Limits

CONCURRENCY_RETRY_S = 1.0
"""When a request of the key ends is not known: soon."""
PER = {"requests": "requests per minute", "tokens": "tokens per minute", "concurrency": "requests at once"}
"""What each limit allows, in words."""


@dataclass(frozen=True, slots=True)
class Denied:
    """`limit` (requests, tokens, concurrency) of `allowed` is used up; `retry_after_s` is inf if no wait helps."""

    limit: str
    allowed: int
    retry_after_s: float


class TokenBucket:
    """Holds at most one minute's allowance and fills evenly; its level may fall below zero."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level, self._at = float(per_minute), now

    def level(self, now: float) -> float:
        if now > self._at:
            self._level = min(float(self.per_minute), self._level + (now - self._at) * self.per_minute / 60.0)
            self._at = now
        return self._level

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until `amount` can be taken; inf if it exceeds one minute's allowance."""
        if amount > self.per_minute:
            return math.inf
        return max(0.0, (amount - self.level(now)) * 60.0 / self.per_minute)

    def take(self, amount: float, now: float) -> None:
        """Take `amount` at any level; a negative amount gives back."""
        self._level = min(float(self.per_minute), self.level(now) - amount)

    def resize(self, per_minute: int, now: float) -> None:
        """Change the limit; the used amount stays used."""
        used = self.per_minute - self.level(now)
        self.per_minute = per_minute
        self._level = per_minute - used


class Quota:
    """The usage of one key."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self.num_active = 0
        self.num_elsewhere = 0  # requests that count as well
        self._requests = TokenBucket(limits.requests_per_minute, now) if limits.requests_per_minute else None
        self._tokens = TokenBucket(limits.tokens_per_minute, now) if limits.tokens_per_minute else None

    def change(self, limits: Limits, now: float) -> None:
        """Change the key's limits; running requests continue."""
        self._requests = _changed(self._requests, limits.requests_per_minute, now)
        self._tokens = _changed(self._tokens, limits.tokens_per_minute, now)
        self.limits = limits

    def look(self, now: float) -> None:
        """Take into account what was granted elsewhere."""

    def enter(self, now: float) -> Denied | None:
        """Count a request in, or say why not; one that was counted in must `leave`."""
        most = self.limits.concurrent_requests
        if most and self.num_active + self.num_elsewhere >= most:
            return Denied("concurrency", most, CONCURRENCY_RETRY_S)
        denied = _denied("requests", self._requests, 1, now)
        if denied is None:
            self.num_active += 1
            if self._requests is not None:
                self._requests.take(1, now)
        return denied

    def leave(self) -> None:
        self.num_active -= 1

    def check_tokens(self, now: float) -> Denied | None:
        """Why no request may generate now; checked before a body is read."""
        return _denied("tokens", self._tokens, 1, now)

    def take_prompt(self, num_tokens: int, now: float) -> Denied | None:
        """Count a prompt, or say why not."""
        denied = _denied("tokens", self._tokens, num_tokens, now)
        if denied is None:
            self.spend(num_tokens, now)
        return denied

    def spend(self, num_tokens: int, now: float) -> None:
        """Count generated tokens; a negative number gives back those of a prompt that was not computed."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, now)

    def _take(self, num_requests: float, num_tokens: float, now: float) -> None:
        for bucket, number in ((self._requests, num_requests), (self._tokens, num_tokens)):
            if bucket is not None and number:
                bucket.take(number, now)

    def _used(self, now: float) -> tuple[float, float]:
        """Requests and tokens of the allowance that are used up; 0 without a limit."""
        requests, tokens = (
            bucket.per_minute - bucket.level(now) if bucket is not None else 0.0
            for bucket in (self._requests, self._tokens)
        )
        return requests, tokens

    def headers(self, now: float) -> dict[str, str]:
        """OpenAI's headers for the limits of the key; `reset` is the time until the bucket is full again."""
        found: dict[str, str] = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                level = bucket.level(now)
                full_s = (bucket.per_minute - level) * 60.0 / bucket.per_minute
                found[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(level)))
                found[f"x-ratelimit-reset-{name}"] = duration(full_s)
        return found


@dataclass(frozen=True, slots=True)
class ModelQuota:
    """A quota that a request counts against, in words: "model 'small'". `of_key`: of its key at this model."""

    quota: Quota
    whose: str
    of_key: bool


def duration(seconds: float) -> str:
    """Seconds in OpenAI's format: 12ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1e3)}ms"
    if seconds < 60:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"


def _changed(bucket: TokenBucket | None, per_minute: int, now: float) -> TokenBucket | None:
    if bucket is None or not per_minute:
        return TokenBucket(per_minute, now) if per_minute else None
    if bucket.per_minute != per_minute:
        bucket.resize(per_minute, now)
    return bucket


def _denied(limit: str, bucket: TokenBucket | None, amount: int, now: float) -> Denied | None:
    wait_s = bucket.wait_s(amount, now) if bucket is not None else 0.0
    return Denied(limit, bucket.per_minute, wait_s) if bucket is not None and wait_s > 0 else None

"""Rate limits of keys, for single models and in total. A pure policy: all methods receive the time.

Requests count when they arrive, prompts when they are tokenised, and output when it is generated. A stream may overdraw
its key's tokens: the stream continues, and the key's next request waits until the level is positive again. Each router
applies the limits separately.

The processes of one router apply the limits together: what siblings have granted is taken from the buckets here. A
process updates its view at each request and twice per second. In between, two processes may grant the same allowance.

A model has limits for all keys together and for single keys. A request counts while the model answers it:

    enter: 429 ─> take_prompt: 429, 400 ─> spend ... ─> leave (the request ended, or another model takes over)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import InvalidRequest
from router.access.errors import RateLimited
from router.access.keys import NO_LIMITS, ApiKey, Limits
from router.siblings import KeyUsage, SharedUsage, UsedUp

if TYPE_CHECKING:
    from router.access.access_control import ClientRequest

CONCURRENCY_RETRY_S = 1.0
"""Retry hint for concurrency limits, because the end of the key's running requests is unknown."""
PER = {"requests": "requests per minute", "tokens": "tokens per minute", "concurrency": "concurrent requests"}
"""Units of each limit, for messages."""


@dataclass(frozen=True, slots=True)
class LimitExceeded:
    """An exceeded limit (requests, tokens or concurrency). `retry_after_s` is inf if waiting does not help."""

    limit: str
    allowed: int
    retry_after_s: float


class TokenBucket:
    """Token bucket with a capacity of one minute's allowance. Its level may be negative."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level, self._at = float(per_minute), now

    def level(self, now: float) -> float:
        if now > self._at:
            self._level = min(float(self.per_minute), self._level + (now - self._at) * self.per_minute / 60.0)
            self._at = now
        return self._level

    def wait_s(self, amount: int, now: float) -> float:
        """Return the seconds until `amount` is available; inf if it exceeds one minute's allowance."""
        if amount > self.per_minute:
            return math.inf
        return max(0.0, (amount - self.level(now)) * 60.0 / self.per_minute)

    def take(self, amount: float, now: float) -> None:
        """Take `amount` regardless of the level; a negative amount is a refund."""
        self._level = min(float(self.per_minute), self.level(now) - amount)

    def resize(self, per_minute: int, now: float) -> None:
        """Change the limit, keeping the used amount."""
        used = self.per_minute - self.level(now)
        self.per_minute = per_minute
        self._level = per_minute - used


class Quota:
    """The limits and usage of one key."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self.num_active = 0
        self.num_elsewhere = 0  # active requests at sibling processes
        self._requests = TokenBucket(limits.requests_per_minute, now) if limits.requests_per_minute else None
        self._tokens = TokenBucket(limits.tokens_per_minute, now) if limits.tokens_per_minute else None

    def change(self, limits: Limits, now: float) -> None:
        """Change the limits. Running requests continue."""
        self._requests = _changed(self._requests, limits.requests_per_minute, now)
        self._tokens = _changed(self._tokens, limits.tokens_per_minute, now)
        self.limits = limits

    def look(self, now: float) -> None:
        """Apply the usage of sibling processes."""

    def enter(self, now: float) -> LimitExceeded | None:
        """Admit a request, or return why not. Each admitted request must `leave`."""
        most = self.limits.concurrent_requests
        if most and self.num_active + self.num_elsewhere >= most:
            return LimitExceeded("concurrency", most, CONCURRENCY_RETRY_S)
        exceeded = _exceeded("requests", self._requests, 1, now)
        if exceeded is None:
            self.num_active += 1
            if self._requests is not None:
                self._requests.take(1, now)
        return exceeded

    def leave(self) -> None:
        self.num_active -= 1

    def check_tokens(self, now: float) -> LimitExceeded | None:
        """Return why no request may generate now; checked before a body is read."""
        return _exceeded("tokens", self._tokens, 1, now)

    def take_prompt(self, num_tokens: int, now: float) -> LimitExceeded | None:
        """Count a prompt, or return why it exceeds the limit."""
        exceeded = _exceeded("tokens", self._tokens, num_tokens, now)
        if exceeded is None:
            self.spend(num_tokens, now)
        return exceeded

    def spend(self, num_tokens: int, now: float) -> None:
        """Count generated tokens. A negative number refunds a prompt that was not computed."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, now)

    def _take(self, num_requests: float, num_tokens: float, now: float) -> None:
        for bucket, number in ((self._requests, num_requests), (self._tokens, num_tokens)):
            if bucket is not None and number:
                bucket.take(number, now)

    def _used(self, now: float) -> tuple[float, float]:
        """Return the used requests and tokens of the allowance; 0 without a limit."""
        requests, tokens = (
            bucket.per_minute - bucket.level(now) if bucket is not None else 0.0
            for bucket in (self._requests, self._tokens)
        )
        return requests, tokens

    def headers(self, now: float) -> dict[str, str]:
        """Return OpenAI's rate limit headers. `reset` is the time until the bucket is full."""
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
    """A quota that a request counts against. `label` names it, such as "model 'small'"; `of_key`: for one key only."""

    quota: Quota
    label: str
    of_key: bool


def duration(seconds: float) -> str:
    """Format seconds like OpenAI: 12ms, 1.5s, 6m0s."""
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


def _exceeded(limit: str, bucket: TokenBucket | None, amount: int, now: float) -> LimitExceeded | None:
    wait_s = bucket.wait_s(amount, now) if bucket is not None else 0.0
    return LimitExceeded(limit, bucket.per_minute, wait_s) if bucket is not None and wait_s > 0 else None


def quota_of(name: str, limits: Limits, now: float, usage: SharedUsage | None) -> Quota:
    """Create a quota. With `usage`, all processes of the router share it under this name."""
    return Quota(limits, now) if usage is None else SharedQuota(limits, now, usage.of_key(name))


class SharedQuota(Quota):
    """A quota that the processes of a router share: `usage` publishes its usage and reads that of siblings.

    `now` must be of the clock that all processes of the machine share. The initial usage is what siblings, or the
    previous process, last published.
    """

    def __init__(self, limits: Limits, now: float, usage: KeyUsage) -> None:
        super().__init__(limits, now)
        self._usage, self._before = usage, usage.of_others()
        seen = usage.seen()
        self._take(
            max((0.0, *(one.requests - (now - one.at) * limits.requests_per_minute / 60.0 for one in seen))),
            max((0.0, *(one.tokens - (now - one.at) * limits.tokens_per_minute / 60.0 for one in seen))),
            now,
        )
        self.look(now)

    def look(self, now: float) -> None:
        found, before = self._usage.of_others(), self._before
        self._before, self.num_elsewhere = found, round(found.active)
        self._take(found.requests - before.requests, found.tokens - before.tokens, now)
        self._publish(now)

    def enter(self, now: float) -> LimitExceeded | None:
        self.look(now)
        exceeded = super().enter(now)
        if exceeded is None:
            self._usage.add(requests=1, active=1)
            self._publish(now)
        return exceeded

    def leave(self) -> None:
        super().leave()
        self._usage.add(active=-1)

    def check_tokens(self, now: float) -> LimitExceeded | None:
        self.look(now)
        return super().check_tokens(now)

    def take_prompt(self, num_tokens: int, now: float) -> LimitExceeded | None:
        self.look(now)
        return super().take_prompt(num_tokens, now)

    def spend(self, num_tokens: int, now: float) -> None:
        super().spend(num_tokens, now)
        self._usage.add(tokens=num_tokens)
        self._publish(now)

    def _publish(self, now: float) -> None:
        self._usage.saw(UsedUp(*self._used(now), now))


class ModelLimits:
    """Rate limits per model. Owned by the event loop of `AccessControl`.

    `on_limited` is called with the name of the key and of the exceeded limit. `usage` is that of all processes of a
    router of several.
    """

    def __init__(
        self, on_limited: Callable[[str, str], None], clock: Callable[[], float], usage: SharedUsage | None = None
    ) -> None:
        self._on_limited, self._clock, self._usage = on_limited, clock, usage
        self._of_all: dict[str, ModelQuota] = {}
        self._of_keys: dict[tuple[str, str], ModelQuota] = {}

    def change(self, limits: Mapping[str, Limits]) -> None:
        """Set the limits of models, by name, keeping the used amounts."""
        now = self._clock()
        for model, one in limits.items():
            if (known := self._of_all.get(model)) is not None:
                known.quota.change(one, now)
            elif one != NO_LIMITS:
                self._of_all[model] = self._quota(f"model {model!r}", one, of_key=False)

    def change_keys(self, keys: Sequence[ApiKey]) -> None:
        """Set the limits of keys, keeping the used amounts."""
        now, known = self._clock(), {key.name: key for key in keys}
        for (name, model), one in list(self._of_keys.items()):
            if name in known:
                one.quota.change(known[name].limits_at(model), now)
            elif not one.quota.num_active:
                del self._of_keys[name, model]

    def look(self, now: float) -> None:
        """Apply the usage of sibling processes."""
        for one in (*self._of_all.values(), *self._of_keys.values()):
            one.quota.look(now)

    def enter(self, client_request: ClientRequest, model: str) -> None:
        """Count the request for a model. Raises RateLimited."""
        now = self._clock()
        for one in self._quotas(client_request.key, model):
            exceeded = one.quota.check_tokens(now) or one.quota.enter(now)
            if exceeded is not None:
                self.leave(client_request)
                raise self._refusal(client_request, one, exceeded)
            client_request.model_quotas = (*client_request.model_quotas, one)

    def take_prompt(self, client_request: ClientRequest, num_tokens: int) -> None:
        """Count a prompt. Raises RateLimited, or InvalidRequest if the prompt is larger than a limit."""
        now = self._clock()
        for number, one in enumerate(client_request.model_quotas):
            exceeded = one.quota.take_prompt(num_tokens, now)
            if exceeded is None:
                continue
            for before in client_request.model_quotas[:number]:
                before.quota.spend(-num_tokens, now)
            if math.isinf(exceeded.retry_after_s):
                limit = f"{one.label} is limited to {exceeded.allowed:,} tokens per minute."
                raise InvalidRequest(f"The prompt has {num_tokens:,} tokens, but {limit}", code="rate_limit_exceeded")
            raise self._refusal(client_request, one, exceeded)

    def spend(self, client_request: ClientRequest, num_tokens: int) -> None:
        """Count generated tokens. A negative number refunds a prompt that was not computed."""
        for one in client_request.model_quotas:
            one.quota.spend(num_tokens, self._clock())

    def leave(self, client_request: ClientRequest) -> None:
        """Stop counting a request, because it ended or another model takes it."""
        for one in client_request.model_quotas:
            one.quota.leave()
        client_request.model_quotas = ()

    def _quotas(self, key: ApiKey, model: str) -> list[ModelQuota]:
        found = [one for one in (self._of_all.get(model),) if one is not None and one.quota.limits != NO_LIMITS]
        if (limits := key.limits_at(model)) != NO_LIMITS:
            place = key.name, model
            if place not in self._of_keys:
                label = f"key {key.name!r} at model {model!r}"
                self._of_keys[place] = self._quota(label, limits, of_key=True)
            found.append(self._of_keys[place])
        return found

    def _quota(self, label: str, limits: Limits, *, of_key: bool) -> ModelQuota:
        """Create a quota. `label` contains spaces, so it never equals the name of a key."""
        return ModelQuota(quota_of(label, limits, self._clock(), self._usage), label, of_key=of_key)

    def _refusal(self, client_request: ClientRequest, one: ModelQuota, exceeded: LimitExceeded) -> RateLimited:
        self._on_limited(client_request.key.name, f"{'key_model' if one.of_key else 'model'}_{exceeded.limit}")
        all_keys = "" if one.of_key else " for all keys together"
        return RateLimited(
            f"Rate limit reached for {one.label}: limit {exceeded.allowed:,} {PER[exceeded.limit]}{all_keys}. Please "
            f"try again in {max(1, math.ceil(exceeded.retry_after_s)):,} s.",
            limit=exceeded.limit,
            retry_after_s=exceeded.retry_after_s,
            of_key=one.of_key,
        )

"""Rate limits of keys, at one model and at all, as a pure policy of the time. Each of several routers grants them.

A request counts when it arrives, a prompt when it is tokenised, output as it is generated. A stream may overdraw its
key's tokens: it continues, and the next request waits until the level is above zero again.

The processes of one router grant together: what others granted is taken from the buckets here. A process learns of it
at the next request here, and twice a second; meanwhile two may grant the same.

At a model, limits are those of all keys together and of single keys. A request counts while one model answers it:

    enter: 429 ─> take_prompt: 429, 400 ─> spend ... ─> leave (it ended, or another model takes it)
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
    from router.access.gate import Visit

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


def quota_of(name: str, limits: Limits, now: float, usage: SharedUsage | None) -> Quota:
    """A quota that all processes of a router grant together, where there are several (`usage`), by this name."""
    return Quota(limits, now) if usage is None else SharedQuota(limits, now, usage.of_key(name))


class SharedQuota(Quota):
    """The usage of a key or a model: `usage` shows it to the other processes, and reads theirs.

    `now` is of the clock that all processes of the machine share. It begins with what others, or the process before,
    saw used up.
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
        self._tell(now)

    def enter(self, now: float) -> Denied | None:
        self.look(now)
        denied = super().enter(now)
        if denied is None:
            self._usage.add(requests=1, active=1)
            self._tell(now)
        return denied

    def leave(self) -> None:
        super().leave()
        self._usage.add(active=-1)

    def check_tokens(self, now: float) -> Denied | None:
        self.look(now)
        return super().check_tokens(now)

    def take_prompt(self, num_tokens: int, now: float) -> Denied | None:
        self.look(now)
        return super().take_prompt(num_tokens, now)

    def spend(self, num_tokens: int, now: float) -> None:
        super().spend(num_tokens, now)
        self._usage.add(tokens=num_tokens)
        self._tell(now)

    def _tell(self, now: float) -> None:
        self._usage.saw(UsedUp(*self._used(now), now))


class ModelLimits:
    """Owned by the event loop of the gate. `on_limited` gets the name of the key and of the limit that is used up.

    `usage` is that of all processes of the router, where there are several.
    """

    def __init__(
        self, on_limited: Callable[[str, str], None], clock: Callable[[], float], usage: SharedUsage | None = None
    ) -> None:
        self._on_limited, self._clock, self._usage = on_limited, clock, usage
        self._of_all: dict[str, ModelQuota] = {}
        self._of_keys: dict[tuple[str, str], ModelQuota] = {}

    def change(self, limits: Mapping[str, Limits]) -> None:
        """Set the limits of models, by name; what is used stays used."""
        now = self._clock()
        for model, one in limits.items():
            if (known := self._of_all.get(model)) is not None:
                known.quota.change(one, now)
            elif one != NO_LIMITS:
                self._of_all[model] = self._quota(f"model {model!r}", one, of_key=False)

    def change_keys(self, keys: Sequence[ApiKey]) -> None:
        """Set the limits of keys; what is used stays used."""
        now, known = self._clock(), {key.name: key for key in keys}
        for (name, model), one in list(self._of_keys.items()):
            if name in known:
                one.quota.change(known[name].limits_at(model), now)
            elif not one.quota.num_active:
                del self._of_keys[name, model]

    def look(self, now: float) -> None:
        """Take into account what other processes granted."""
        for one in (*self._of_all.values(), *self._of_keys.values()):
            one.quota.look(now)

    def enter(self, visit: Visit, model: str) -> None:
        """Count the request at a model. Raises RateLimited."""
        now = self._clock()
        for one in self._quotas(visit.key, model):
            denied = one.quota.check_tokens(now) or one.quota.enter(now)
            if denied is not None:
                self.leave(visit)
                raise self._refusal(visit, one, denied)
            visit.model_quotas = (*visit.model_quotas, one)

    def take_prompt(self, visit: Visit, num_tokens: int) -> None:
        """Count a prompt. Raises RateLimited, or InvalidRequest for one that always exceeds a limit."""
        now = self._clock()
        for number, one in enumerate(visit.model_quotas):
            denied = one.quota.take_prompt(num_tokens, now)
            if denied is None:
                continue
            for before in visit.model_quotas[:number]:
                before.quota.spend(-num_tokens, now)
            if math.isinf(denied.retry_after_s):
                most = f"{one.whose} may have {denied.allowed:,} tokens per minute"
                raise InvalidRequest(f"the prompt has {num_tokens:,} tokens, and {most}", code="rate_limit_exceeded")
            raise self._refusal(visit, one, denied)

    def spend(self, visit: Visit, num_tokens: int) -> None:
        """Count generated tokens; a negative number gives back those of a prompt that was not computed."""
        for one in visit.model_quotas:
            one.quota.spend(num_tokens, self._clock())

    def leave(self, visit: Visit) -> None:
        """It ended, or another model takes it."""
        for one in visit.model_quotas:
            one.quota.leave()
        visit.model_quotas = ()

    def _quotas(self, key: ApiKey, model: str) -> list[ModelQuota]:
        found = [one for one in (self._of_all.get(model),) if one is not None and one.quota.limits != NO_LIMITS]
        if (limits := key.limits_at(model)) != NO_LIMITS:
            place = key.name, model
            if place not in self._of_keys:
                whose = f"key {key.name!r} at model {model!r}"
                self._of_keys[place] = self._quota(whose, limits, of_key=True)
            found.append(self._of_keys[place])
        return found

    def _quota(self, whose: str, limits: Limits, *, of_key: bool) -> ModelQuota:
        """`whose` has spaces in it, so that it is no name of a key."""
        return ModelQuota(quota_of(whose, limits, self._clock(), self._usage), whose, of_key=of_key)

    def _refusal(self, visit: Visit, one: ModelQuota, denied: Denied) -> RateLimited:
        self._on_limited(visit.key.name, f"{'key_model' if one.of_key else 'model'}_{denied.limit}")
        all_keys = "" if one.of_key else " of all keys"
        return RateLimited(
            f"{one.whose} may have {denied.allowed:,} {PER[denied.limit]}{all_keys}; try again in "
            f"{max(1, math.ceil(denied.retry_after_s)):,} s",
            limit=denied.limit,
            retry_after_s=denied.retry_after_s,
            of_key=one.of_key,
        )

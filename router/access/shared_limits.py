"""Rate limits over all processes of a router: what others granted is taken from the buckets here.

A process learns of it at the next request here, and twice a second; meanwhile two may grant the same.
"""

from __future__ import annotations

from router.access.keys import Limits
from router.access.limits import Denied, Quota
from router.siblings import KeyUsage, SharedUsage, UsedUp


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

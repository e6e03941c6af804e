"""Rate limits at a model: of all keys together, and of single keys. A request counts while one model answers it.

enter: 429 ─> take_prompt: 429, 400 ─> spend ... ─> leave (it ended, or another model takes it)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from common.errors import InvalidRequest
from router.access.errors import RateLimited
from router.access.keys import NO_LIMITS, ApiKey, Limits
from router.access.limits import PER, Denied, ModelQuota
from router.access.shared_limits import quota_of
from router.access.visit import Visit
from router.siblings import SharedUsage


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

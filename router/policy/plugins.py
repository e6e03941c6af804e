"""Routing policies by name or from a module, and a guard against their errors."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from common.errors import ConfigError
from common.observe import REMIND_S
from router.fleet import Worker
from router.policy.plain import LeastLoaded, PrefixOnly, RandomPolicy, RoundRobin
from router.policy.policy import UNPREDICTED, Choice, Policy, choice_error, predict
from router.policy.request_shape import RequestShape
from router.policy.routing import RoutingPolicy

log = logging.getLogger(__name__)

POLICIES: dict[str, type[Policy]] = {
    "diptych": RoutingPolicy,
    "random": RandomPolicy,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-only": PrefixOnly,
}
"""Values of `--routing-policy` in addition to module:Class."""
FIELD = "routing_policy"


def load_policy(name: str, local_prefill_threshold: int, chance: Random | None = None, *, field: str = FIELD) -> Policy:
    """Create the policy with this name, or of the class module:Class.

    Raises ConfigError for `field` if the policy does not exist, cannot be imported, does not implement `Policy`, or
    fails in its constructor.
    """
    known = ", ".join(POLICIES)
    policy_class = POLICIES.get(name)
    if policy_class is None:
        module, colon, attribute = name.partition(":")
        if not (module and colon and attribute):
            raise ConfigError(field, name, f"one of {known}, or module:Class")
        try:
            policy_class = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # a module may raise anything
            raise ConfigError(field, name, f"one of {known}, or an importable module:Class ({error})") from error
    if not (isinstance(policy_class, type) and issubclass(policy_class, Policy)):
        raise ConfigError(field, name, f"one of {known}, or a subclass of router.policy.Policy")
    try:
        return policy_class(local_prefill_threshold, chance)
    except Exception as error:  # abstract methods are missing, or its own code fails
        raise ConfigError(field, name, f"one of {known}, or a class that can be instantiated ({error})") from error


class GuardedPolicy(Policy):
    """Falls back to the built-in policy for each decision in which a policy raises or makes an invalid choice."""

    def __init__(self, policy: Policy, on_error: Callable[[], None] = lambda: None) -> None:
        """`on_error` is called for each such decision."""
        super().__init__(policy.local_prefill_threshold, policy.chance)
        self._policy, self._on_error = policy, on_error
        self._built_in = RoutingPolicy(policy.local_prefill_threshold)
        self.weighs_all = bool(policy.weighs_all)
        self._logged_at = -REMIND_S

    def choose(
        self, prefill: Sequence[Worker], decode: Sequence[Worker], shape: RequestShape, now: float
    ) -> Choice | None:
        try:
            choice = self._policy.choose(_trusted(prefill), _trusted(decode), shape, now)
            if choice is None:
                return None
            if why := choice_error(choice, prefill, decode, shape):
                raise ValueError(why)
            if choice.forecast is UNPREDICTED:
                return replace(choice, forecast=predict(choice.prefill, choice.decode, shape, now))
            return choice
        except Exception as error:
            self._failed(error, now)
            return self._built_in.choose(prefill, decode, shape, now)

    def choose_prefill(
        self, prefill: Sequence[Worker], decode: Worker, shape: RequestShape, now: float
    ) -> Worker | None:
        try:
            first = self._policy.choose_prefill(_trusted(prefill), decode, shape, now)
            if first is not None and (why := choice_error(Choice(first, decode), prefill, [decode], shape)):
                raise ValueError(why)
            return first
        except Exception as error:
            self._failed(error, now)
            return self._built_in.choose_prefill(prefill, decode, shape, now)

    def _failed(self, error: Exception, now: float) -> None:
        self._on_error()
        if now - self._logged_at >= REMIND_S:
            self._logged_at = now
            name = type(self._policy).__qualname__
            log.error("routing policy %s failed, using the built-in policy instead: %r", name, error, exc_info=error)


def _trusted(workers: Sequence[Worker]) -> Sequence[Worker]:
    """Return the workers that are no suspects, if there are any. A worker that fails fast looks idle."""
    trusted = [worker for worker in workers if not worker.life.suspect]
    return trusted or workers

"""Request classes: latency goals, priorities and shares.

    --request-class name=interactive,ttft_ms=500,tpot_ms=50,priority=5 name=batch,priority=-5 name=search,share=3

Each `name=...` begins the next class, so that flags, environment and TOML need only commas as separators. The class
`default` always exists and has the goals of `--slo-ttft-ms` and `--slo-tpot-ms`, and refuses by `--slo-refuse`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from common.config.field import GOAL_MS
from common.errors import ConfigError
from common.wire import MAX_PRIORITY

FIELD = "request_class"
DEFAULT = "default"
BATCH = "batch"
BATCH_CLASSES = ("flex", BATCH)
"""The class of work without a deadline is the first of these that exists."""
NAME = re.compile(r"[a-z0-9]([a-z0-9_-]{0,38}[a-z0-9])?")
MAX_CLASSES = 16
"""Each class has its own metric labels and queues."""
KEYS = ("name", "ttft_ms", "tpot_ms", "priority", "share", "refuse")
EXPECTS = "classes such as name=interactive,ttft_ms=500,tpot_ms=50,priority=5"
OVERLOAD, PREDICTED = REFUSALS = ("overload", "predicted")
"""Requests that a class refuses: those beyond the wait limit, or also those that are predicted to miss a goal."""
LEAST_SHARE, MOST_SHARE = 0.001, 1000.0
"""Relative to `COMMON_SHARE`. More extreme shares would starve a class."""
NO_LANE = ""
"""Lane of the classes without their own share. They have `COMMON_SHARE` in total, divided among API keys."""
COMMON_SHARE = 1.0
"""The unit of shares."""


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Goals, priority and share of a class.

    `ttft_s` and `tpot_s` are goals in seconds, 0 for none. Classes with a higher `priority` are served first. Classes
    with the same priority divide tokens by `share`, where 0 means the common share. `refuse` is one of `REFUSALS`. A
    class that no setting defines `is_built_in`.
    """

    name: str = DEFAULT
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    priority: int = 0
    share: float = 0.0
    is_built_in: bool = False
    refuse: str = OVERLOAD

    @property
    def has_goals(self) -> bool:
        return self.ttft_s > 0 or self.tpot_s > 0

    @property
    def refuses_misses(self) -> bool:
        """Whether requests that are predicted to miss a goal are rejected."""
        return self.refuse == PREDICTED

    @property
    def lane(self) -> str:
        """Lane in which its requests compete with classes of the same priority."""
        return self.name if self.share else NO_LANE

    @property
    def weight(self) -> float:
        """Share of its lane."""
        return self.share or COMMON_SHARE


def request_classes(
    parts: Sequence[str], ttft_ms: float, tpot_ms: float, refuse: str = OVERLOAD
) -> Mapping[str, RequestClass]:
    """Return all classes by name. `default` has the goals `ttft_ms` and `tpot_ms`, and `refuse`. Raises ConfigError."""
    default = RequestClass(ttft_s=ttft_ms / 1000, tpot_s=tpot_ms / 1000, refuse=refuse)
    classes = {DEFAULT: default}
    named = set()
    for given in _split(parts):
        one = _class_of({"refuse": refuse, **given} if given["name"] == DEFAULT else given)
        if one.name in named:
            raise ConfigError(FIELD, f"name={one.name}", "a class that is defined once")
        named.add(one.name)
        if one.name == DEFAULT:
            one = _merged(default, one)
        elif one.refuses_misses and not one.has_goals:
            raise ConfigError(FIELD, f"name={one.name},refuse={one.refuse}", "a class with ttft_ms or tpot_ms")
        classes[one.name] = one
    if len(classes) > MAX_CLASSES:
        raise ConfigError(FIELD, f"{len(classes)} classes", f"at most {MAX_CLASSES}, including the class {DEFAULT}")
    return classes


def with_batch(classes: Mapping[str, RequestClass]) -> Mapping[str, RequestClass]:
    """Return the classes, with a built-in class for batches if none of `BATCH_CLASSES` is defined."""
    if any(name in classes for name in BATCH_CLASSES):
        return classes
    return {**classes, BATCH: RequestClass(BATCH, priority=-MAX_PRIORITY, is_built_in=True)}


def _split(parts: Sequence[str]) -> list[dict[str, str]]:
    """Return the keys and values of each class."""
    found: list[dict[str, str]] = []
    for part in ",".join(parts).split(",") if parts else ():
        key, equals, value = (text.strip() for text in part.partition("="))
        if key not in KEYS or not equals:
            raise ConfigError(FIELD, part, f"KEY=VALUE with one of the keys {', '.join(KEYS)}")
        if key == "name":
            found.append({})
        elif not found:
            raise ConfigError(FIELD, part, "after name=..., which begins a class")
        if key in found[-1]:
            raise ConfigError(FIELD, part, f"given once in class {found[-1]['name']}")
        found[-1][key] = value
    return found


def _class_of(given: Mapping[str, str]) -> RequestClass:
    name = given["name"]
    if not NAME.fullmatch(name):
        raise ConfigError(FIELD, f"name={name}", "up to 40 lowercase letters, digits, - and _")
    goals = _goal_s(given, "ttft_ms"), _goal_s(given, "tpot_ms")
    return RequestClass(name, *goals, _priority(given), _share(given), refuse=_refuse(given))


def _merged(default: RequestClass, one: RequestClass) -> RequestClass:
    """Return the class `default` with the goals of its definition. Raises ConfigError for a goal that is set twice."""
    for key, flag in (("ttft_s", "slo_ttft_ms"), ("tpot_s", "slo_tpot_ms")):
        old, new = getattr(default, key), getattr(one, key)
        if old and new and old != new:
            given = f"name={DEFAULT},{flag[4:]}={new * 1000:g}"
            raise ConfigError(FIELD, given, f"equal to --{flag.replace('_', '-')} {old * 1000:g}")
    ttft_s, tpot_s = one.ttft_s or default.ttft_s, one.tpot_s or default.tpot_s
    return replace(one, ttft_s=ttft_s, tpot_s=tpot_s)


def _goal_s(given: Mapping[str, str], key: str) -> float:
    text = given.get(key, "0")
    try:
        goal_ms = float(text)
    except ValueError:
        goal_ms = math.nan
    if not GOAL_MS["ge"] <= goal_ms <= GOAL_MS["le"]:
        raise ConfigError(FIELD, f"{key}={text}", f"0 (no goal) to {GOAL_MS['le']:.0f} milliseconds")
    return goal_ms / 1000


def _priority(given: Mapping[str, str]) -> int:
    text = given.get("priority", "0")
    if not re.fullmatch(r"[+-]?[0-9]{1,4}", text) or abs(int(text)) > MAX_PRIORITY:
        raise ConfigError(FIELD, f"priority={text}", f"a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}")
    return int(text)


def _share(given: Mapping[str, str]) -> float:
    if (text := given.get("share")) is None:
        return 0.0
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not LEAST_SHARE <= share <= MOST_SHARE:
        raise ConfigError(FIELD, f"share={text}", f"a number from {LEAST_SHARE:g} to {MOST_SHARE:g}")
    return share


def _refuse(given: Mapping[str, str]) -> str:
    if (refuse := given.get("refuse", OVERLOAD)) not in REFUSALS:
        raise ConfigError(FIELD, f"refuse={refuse}", " or ".join(REFUSALS))
    return refuse

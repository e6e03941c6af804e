"""Residency: which models have workers in memory, when each model is loaded by its first request. Pure.

    idle ──request──> waiting ──memory is free──> loading ──ready──> loaded ──keep-alive, or another model──> unloading
      ^                                              └──failed, with a pause before the next attempt──┐            │
      └───────────────────────────────────────────────────────────────────────────────────────────────┴───────────┘

A request reserves the memory of its model at once: idle models are unloaded for it, the least recently used first. A
model with requests is never unloaded. If too little memory can be freed, the request is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from common.errors import MAX_RETRY_AFTER_S, RETRY_AFTER_S, Unavailable, backoff_s
from common.observe import in_bytes

Stage = Literal["idle", "waiting", "loading", "loaded", "unloading"]
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pause after a failed load, which doubles with each failure. Until its end, requests get the reason of the failure."""


@dataclass(slots=True)
class Residence:
    """State of a model that has been requested.

    `num_bytes` is the memory of its workers. `num_uses` counts requests that wait for it or run. `since` is when the
    stage began, and `used_at` when the last request ended. `keep_s`: time without requests after which it is unloaded.
    `failure` is the reason why the last load failed; until `retry_at` there is no further attempt.
    """

    num_bytes: int
    keep_s: float
    stage: Stage = "idle"
    num_uses: int = 0
    since: float = 0.0
    used_at: float = 0.0
    failure: str = ""
    num_failures: int = 0
    retry_at: float = -math.inf

    @property
    def is_evictable(self) -> bool:
        """Whether the model may be unloaded for another."""
        return self.stage == "loaded" and not self.num_uses

    @property
    def is_resident(self) -> bool:
        """Whether its workers may use memory."""
        return self.stage in ("loading", "loaded", "unloading")

    @property
    def is_wanted(self) -> bool:
        """Whether its memory is reserved."""
        return self.stage in ("waiting", "loading", "loaded") or (self.stage == "unloading" and self.num_uses > 0)

    @property
    def expires_at(self) -> float:
        """Time at which it will be unloaded without further requests; infinity while it has some."""
        return math.inf if self.num_uses or self.stage != "loaded" else self.used_at + self.keep_s

    def move(self, stage: Stage, now: float) -> None:
        self.stage, self.since = stage, now


class Residency:
    """Decides which models are loaded, within `budget` bytes. `keep_s`: default keep-alive, infinity to keep models.

    The caller reports `begin` and `end` of each request, and `loaded`, `failed` and `gone` for the workers of a model.
    After each report, `step` returns the models that must have workers.
    """

    def __init__(self, budget: int, keep_s: float) -> None:
        self.budget, self.keep_s = budget, keep_s
        self.models: dict[str, Residence] = {}

    def begin(self, name: str, num_bytes: int, now: float, keep_s: float | None = None) -> None:
        """Begin a request for a model that needs `num_bytes`. `keep_s` is its keep-alive from now on.

        Raises Unavailable if its last load failed a moment ago, or memory for it cannot be freed.
        """
        model = self.models.setdefault(name, Residence(num_bytes, self.keep_s))
        if not model.is_wanted:
            self.check(name, now)
            self._reserve(name, num_bytes, now)
            model.num_bytes = max(num_bytes, model.num_bytes if model.is_resident else 0)
            if model.stage == "idle":
                model.move("waiting", now)
        model.keep_s = self.keep_s if keep_s is None else keep_s
        model.num_uses += 1

    def check(self, name: str, now: float) -> None:
        """Raise Unavailable if the last load of a model failed a moment ago."""
        model = self.models.get(name)
        if model is not None and now < model.retry_at:
            raise load_failed(name, model.failure, model.retry_at - now)

    def end(self, name: str, now: float) -> None:
        """End a request that has begun."""
        model = self.models[name]
        model.num_uses -= 1
        model.used_at = now

    def release(self, name: str) -> None:
        """Unload a model as soon as it has no requests."""
        if name in self.models:
            self.models[name].keep_s = 0.0

    def adopt(self, name: str, num_bytes: int, now: float) -> None:
        """Add a model whose workers already run."""
        self.models[name] = Residence(num_bytes, self.keep_s, "loading", since=now, used_at=now)

    def loaded(self, name: str, now: float) -> None:
        """Report that the workers of a loading model are ready."""
        model = self.models[name]
        if model.stage == "loading":
            model.move("loaded", now)
            model.used_at, model.failure, model.num_failures = now, "", 0

    def failed(self, name: str, reason: str, now: float) -> None:
        """Report that a model could not be loaded, or lost its workers for good, and that it has none left."""
        model = self.models.setdefault(name, Residence(0, self.keep_s))
        pause_s = backoff_s(FIRST_PAUSE_S, LONGEST_PAUSE_S, model.num_failures)
        model.failure, model.num_failures, model.retry_at = reason, model.num_failures + 1, now + pause_s
        model.move("idle", now)

    def gone(self, name: str, now: float) -> None:
        """Report that the workers of an unloading model have exited."""
        model = self.models[name]
        if model.stage == "unloading":
            model.move("waiting" if model.num_uses else "idle", now)

    def step(self, now: float) -> list[str]:
        """Unload expired models, start loading those for which memory is free, and return those with workers."""
        for model in self.models.values():
            if model.stage == "loaded" and now >= model.expires_at:
                model.move("unloading", now)
            elif model.stage == "waiting" and not model.num_uses:  # its requests have ended
                model.move("idle", now)
        waiting = [model for model in self.models.values() if model.stage == "waiting"]
        for model in sorted(waiting, key=lambda one: one.since):
            if self.num_resident_bytes + model.num_bytes <= self.budget:
                model.move("loading", now)
        return [name for name, model in self.models.items() if model.stage in ("loading", "loaded")]

    def stage(self, name: str) -> Stage:
        """Return the stage of a model."""
        return self.models[name].stage if name in self.models else "idle"

    @property
    def num_resident_bytes(self) -> int:
        """Bytes that workers may use now."""
        return sum(model.num_bytes for model in self.models.values() if model.is_resident)

    def _reserve(self, name: str, num_bytes: int, now: float) -> None:
        """Unload least recently used models until the wanted ones and this one fit. Raises Unavailable."""
        if num_bytes > self.budget:
            raise Unavailable(
                f"The model {name!r} needs {in_bytes(num_bytes)} of memory, more than the {in_bytes(self.budget)} for "
                "models (--max-memory-gib).",
                param="model",
                retry_after_s=MAX_RETRY_AFTER_S,
            )
        others = [(other, model) for other, model in self.models.items() if other != name and model.is_wanted]
        over = sum(model.num_bytes for _, model in others) + num_bytes - self.budget
        victims = sorted(
            (model for _, model in others if model.is_evictable),
            key=lambda model: (math.isinf(model.keep_s), model.used_at),
        )
        if over > sum(model.num_bytes for model in victims):
            busy = [f"{other} ({in_bytes(model.num_bytes)})" for other, model in others if not model.is_evictable]
            raise Unavailable(
                f"The model {name!r} needs {in_bytes(num_bytes)} of memory. Of {in_bytes(self.budget)} for models "
                f"(--max-memory-gib), these have requests and cannot be unloaded: {', '.join(busy)}.",
                param="model",
                retry_after_s=RETRY_AFTER_S,
            )
        for model in _until_freed(victims, over):
            model.move("unloading", now)


def _until_freed(victims: list[Residence], over: int) -> Iterator[Residence]:
    for model in victims:
        if over <= 0:
            return
        over -= model.num_bytes
        yield model


def load_failed(name: str, reason: str, retry_after_s: float) -> Unavailable:
    """Return the error of requests for a model that could not be loaded."""
    after_s = max(RETRY_AFTER_S, retry_after_s)
    return Unavailable(f"The model {name!r} cannot be loaded: {reason}", param="model", retry_after_s=after_s)

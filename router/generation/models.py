"""Which of a router's models a request gets: every endpoint asks here.

asked name ── Catalog ──> the models that may answer it ── ready? ──> candidates, the best first
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from common.errors import RETRY_AFTER_S, ModelNotFound, Unavailable
from router.access import ANONYMOUS, ApiKey, Forbidden
from router.generation.adapters import ServedAdapters
from router.models import Catalog


class Served(Protocol):
    """What the choice among models reads of a served model."""

    @property
    def model_name(self) -> str: ...
    @property
    def availability(self) -> tuple[bool, str]:
        """Whether it would answer a request now, and what is missing."""
        ...

    @property
    def max_model_len(self) -> int: ...
    @property
    def adapters(self) -> ServedAdapters: ...


S = TypeVar("S", bound=Served)


@dataclass(frozen=True, slots=True)
class ModelCandidates(Generic[S]):
    """The model that a request is for, and those of it and its fallbacks that may answer now, the best first."""

    first: S
    usable: tuple[S, ...]


@dataclass(frozen=True, slots=True)
class ShownModel(Generic[S]):
    """What a list of models says of one name. `service`: the model that it stands for; None for a split.

    `ready`: whether a worker would answer now. Every model that it stands for takes `max_model_len` tokens. `parent`:
    the base model of an adapter, else "".
    """

    name: str
    service: S | None
    ready: bool
    max_model_len: int
    parent: str = ""


class Models(Generic[S]):
    """The models of a router: `services` by their names, the default one first. The `catalog` may be replaced."""

    def __init__(self, catalog: Catalog, services: Mapping[str, S]) -> None:
        self.catalog, self.services = catalog, services

    def candidates(self, asked: str | None, key: ApiKey = ANONYMOUS, requester: str = "") -> ModelCandidates[S]:
        """The models to try for a request: those with ready workers, and behind them one that waits for workers.

        `requester` is whom splits draw for. Raises ModelNotFound, Forbidden, and Unavailable when none of them has a
        worker and none may wait for one.
        """
        base = self.base_of(asked, key)  # an adapter has no fallbacks
        chain = (base,) if base is not None else self.catalog.chain(asked, key, requester)
        if len(chain) == 1 and self.catalog.entries[chain[0]].holds:
            return ModelCandidates(only := self.services[chain[0]], (only,))
        found = {name: self.services[name].availability for name in chain}
        ready = [name for name in chain if found[name][0]]
        holding = [name for name in chain if not found[name][0] and self.catalog.entries[name].holds]
        first = chain[0]
        if usable := tuple(self.services[name] for name in (*ready, *holding[:1])):
            return ModelCandidates(self.services[first], usable)
        raise Unavailable(f"model {first!r}: {found[first][1]}", param="model", retry_after_s=RETRY_AFTER_S)

    def lacking(self, asked: str | None) -> str:
        """A model, of several, for whose workers a request under this name may have to wait; "" if for none.

        Raises ModelNotFound.
        """
        self.catalog.chain(asked)
        if len(self.services) == 1:
            return ""
        names = self.catalog.models[:1] if asked is None else self.catalog.targets(asked)
        available = set(self.available)
        return next((name for name in names if available.isdisjoint(self.catalog.with_fallbacks(name))), "")

    @property
    def available(self) -> list[str]:
        """The models that have workers for a request now."""
        return [name for name, service in self.services.items() if service.availability[0]]

    def one(self, asked: str | None, key: ApiKey = ANONYMOUS) -> S:
        """The model for what needs no worker, such as tokenizing. Raises ModelNotFound, Forbidden."""
        base = self.base_of(asked, key)
        return self.services[self.catalog.chain(asked, key)[0] if base is None else base]

    def base_of(self, asked: str | None, key: ApiKey = ANONYMOUS) -> str | None:
        """The model whose adapter has this name; None when it names none. Raises Forbidden.

        A key may use an adapter that is on its list, and those of the models that it may use.
        """
        if asked is None or self.catalog.has(asked):
            return None
        base = next((name for name, service in self.services.items() if service.adapters.has(asked)), None)
        if base is not None and asked not in key.models and not self.catalog.may_use(key, base):
            raise Forbidden(f"key {key.name!r} may not use adapter {asked!r} of model {base!r}", param="model")
        return base

    def name_of(self, asked: str | None, own: str) -> str:
        """The name that an answer of the model `own` has: as asked, or of the model where another name stands for it.

        Raises ModelNotFound for an unknown name.
        """
        if asked is None or asked == own:
            return own
        if self.base_of(asked) == own:
            return asked
        self.catalog.chain(asked)
        if own not in self.services:  # that of a front, which stands for all of its models
            return asked
        return asked if asked in self.catalog.own_names(own) else own

    def listed(self, key: ApiKey = ANONYMOUS) -> list[ShownModel[S]]:
        """What clients with this key may ask for now. A model that waits for no worker is there while one is ready."""
        available = {name: service.availability[0] for name, service in self.services.items()}
        shown = [self._shown(name, available) for name in (one.name for one in self.catalog.listed(key))]
        found = [one for one in shown if one.ready or self._holds(one.name)]
        return [*found, *(one for name in self.services for one in self._adapters(name, key))]

    def shown(self, asked: str, key: ApiKey = ANONYMOUS) -> ShownModel[S]:
        """One name of the list. Raises ModelNotFound, Forbidden."""
        if (base := self.base_of(asked, key)) is not None:
            if (one := next((one for one in self._adapters(base, key) if one.name == asked), None)) is not None:
                return one
            raise ModelNotFound(f"adapter {asked!r} is being loaded", param="model")
        self.catalog.chain(asked, key)
        return self._shown(asked, {name: self.services[name].availability[0] for name in self.catalog.targets(asked)})

    def _adapters(self, base: str, key: ApiKey) -> Iterator[ShownModel[S]]:
        """The adapters of a model that clients with this key may ask for."""
        service, may_use = self.services[base], self.catalog.may_use(key, base)
        for known in service.adapters.names():
            if (may_use or known.name in key.models) and not self.catalog.has(known.name):
                yield ShownModel(known.name, service, known.ready, service.max_model_len, base)

    def _holds(self, name: str) -> bool:
        return any(self.catalog.entries[model].holds for model in self.catalog.targets(name))

    def _shown(self, name: str, available: Mapping[str, bool]) -> ShownModel[S]:
        services = [self.services[model] for model in self.catalog.targets(name)]
        shortest = min(service.max_model_len for service in services)
        ready = any(available[service.model_name] for service in services)
        return ShownModel(name, services[0] if self.catalog.is_model(name) else None, ready, shortest)

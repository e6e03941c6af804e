"""Model selection: maps the requested model name to the models that may serve it. Pure.

name ─ split? ─> one model, drawn by weight ┐
     ─ model, alias ────────────────────────┴─> that model, its fallbacks, their fallbacks ...

A split draws by weighted rendezvous hashing, so a requester always gets the same model: each model has a score from a
hash of its name and the requester, and the highest score wins (Wang and Ravishankar, "Hash-based virtual hierarchies",
with the weights of Schindelhauer and Schomaker 2005). When a weight changes, requesters move only to a model whose
share grew, or away from one whose share shrank.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from common.errors import ConfigError, ModelNotFound, listed, quoted
from router.access import ANONYMOUS, ApiKey, Forbidden
from router.models.models_file import MODELS_FIELD, ModelEntry, ModelTable, Split

HASH_BYTES = 8
"""Size of the hash. 64 bits exceed the precision of a float between 0 and 1."""
MAX_SHOWN_NAME = 100
"""Maximum length of an unknown model name in an error."""
MAX_SHOWN_NAMES = 32
"""Maximum number of model names in an error."""


def draw(weights: Mapping[str, float], split: str, requester: str) -> str:
    """Select a model for a requester, such as a user or a request id. At least one weight must be above 0."""
    return max(
        (name for name in weights if weights[name] > 0), key=lambda name: _score(name, split, requester, weights[name])
    )


def _score(name: str, split: str, requester: str, weight: float) -> float:
    digest = hashlib.blake2b(json.dumps([split, name, requester]).encode(), digest_size=HASH_BYTES).digest()
    even = (int.from_bytes(digest) + 0.5) / 2.0 ** (8 * HASH_BYTES)  # from 0 to 1
    return math.inf if even >= 1.0 else -weight / math.log(even)


@dataclass(frozen=True, slots=True)
class ListedName:
    """A name that clients may request: a model's name or alias, or a split, which has no `model`."""

    name: str
    model: str
    entry: ModelEntry | None = None
    split: Split | None = None


class Catalog:
    """Names of a router's models. `models` are their main names, starting with the default model."""

    def __init__(self, table: ModelTable, model_ids: Sequence[str]) -> None:
        """Validate the table. `model_ids` are the models' own names, in its order. Raises ConfigError."""
        self.entries: dict[str, ModelEntry] = {}
        self._models: dict[str, str] = {}
        self._splits: dict[str, Split] = {}
        if len(set(model_ids)) < len(model_ids):
            twice = next(one for one in model_ids if model_ids.count(one) > 1)
            raise ConfigError("model", twice, "unique, because workers report the model that they serve by this name")
        named = [(entry.name or model_id, entry) for entry, model_id in zip(table.models, model_ids, strict=True)]
        for name, entry in named:
            for each in (name, *entry.aliases):
                self._add_name(each, name)
            self.entries[name] = entry
        for split in table.splits:
            self._check_free(split.name)
            self._splits[split.name] = split
        for (name, entry), model_id in zip(named, model_ids, strict=True):
            for other in (model_id, entry.model):  # unless it is the name of another model
                if other not in self._splits:
                    self._models.setdefault(other, name)
        self._own_names = {
            name: frozenset(one for one in (model_id, entry.model) if self._models.get(one) == name)
            for (name, entry), model_id in zip(named, model_ids, strict=True)
        }
        self._check_targets(table)

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self.entries)

    def listed(self, key: ApiKey = ANONYMOUS) -> Iterator[ListedName]:
        """Yield all names that clients with this key may request: models, each followed by its aliases, then splits."""
        for name, entry in self.entries.items():
            for each in (name, *entry.aliases):
                if self.may_use(key, each):
                    yield ListedName(each, name, entry=entry)
        for split in self._splits.values():
            if self.may_use(key, split.name):
                yield ListedName(split.name, "", split=split)

    def may_use(self, key: ApiKey, name: str) -> bool:
        """Whether this key may request a known name: the key lists it, or everything that it stands for."""
        if not key.models or name in key.models:
            return True
        if (split := self._splits.get(name)) is not None:
            return all(self.may_use(key, model) for model, weight in split.weights.items() if weight > 0)
        model = self._models[name]
        return any(own in key.models and one == model for own, one in self._models.items())

    def chain(self, asked: str | None, key: ApiKey = ANONYMOUS, requester: str = "") -> tuple[str, ...]:
        """Return the models that may serve a request, best first. The default is the first that the key may use.

        Raises ModelNotFound for an unknown name, and Forbidden for one that the key may not use.
        """
        if asked is None:
            asked = next((one.name for one in self.listed(key)), next(iter(self.models), ""))
            if not asked:
                raise ModelNotFound(
                    "There is no model on this machine. diptych pull NAME downloads one.", param="model"
                )
        if asked not in self._models and asked not in self._splits:
            raise self.not_found(asked, key)
        if not self.may_use(key, asked):
            raise Forbidden(
                f"The key {key.name!r} may not use the model {_shown(asked)}. Available models: {self._names(key)}.",
                param="model",
            )
        split = self._splits.get(asked)
        first = self._models[asked] if split is None else draw(split.weights, split.name, requester)
        return (first, *(name for name in self._fallbacks_of(first) if self.may_use(key, name)))

    def not_found(self, asked: str, key: ApiKey | None) -> ModelNotFound:
        """Create the error for an unknown name. It lists the models that the key may use, and none without a key."""
        known = "" if key is None else f" Available models: {self._names(key)}."
        return ModelNotFound(f"The model {_shown(asked)} does not exist.{known}", param="model")

    def targets(self, asked: str) -> tuple[str, ...]:
        """Return the models that a known name stands for, without fallbacks."""
        if (split := self._splits.get(asked)) is None:
            return (self._models[asked],)
        return tuple(name for name, weight in split.weights.items() if weight > 0)

    def with_fallbacks(self, model: str) -> tuple[str, ...]:
        """Return the model and its fallbacks."""
        return (model, *self._fallbacks_of(model))

    def own_names(self, model: str) -> frozenset[str]:
        """Return the names that a model itself has, in addition to the configured ones."""
        return self._own_names[model]

    def is_model(self, name: str) -> bool:
        """Whether a name stands for a single model."""
        return name in self._models

    def has(self, name: str) -> bool:
        """Whether the name is in use."""
        return name in self._models or name in self._splits

    def _fallbacks_of(self, first: str) -> list[str]:
        """Return the fallbacks of a model, then their fallbacks, without duplicates."""
        found: list[str] = []
        level = [first]
        while level:
            level = [self._models[name] for model in level for name in self.entries[model].fallbacks]
            level = [name for name in dict.fromkeys(level) if name != first and name not in found]
            found += level
        return found

    def _names(self, key: ApiKey) -> str:
        return listed([repr(one.name) for one in self.listed(key)], MAX_SHOWN_NAMES)

    def _add_name(self, name: str, model: str) -> None:
        self._check_free(name)
        self._models[name] = model

    def _check_free(self, name: str) -> None:
        if self.has(name):
            raise ConfigError(MODELS_FIELD, name, "unique among the names of models, aliases and splits")

    def _check_targets(self, table: ModelTable) -> None:
        for entry in table.models:
            self._check_known(entry.fallbacks, f"fallbacks of {entry.name or entry.model}")
        for split in table.splits:
            self._check_known(split.weights, f"weights of {split.name}")

    def _check_known(self, names: Mapping[str, float] | Sequence[str], where: str) -> None:
        for name in names:
            if name not in self._models:
                known = ", ".join(dict.fromkeys(self._models))
                raise ConfigError(MODELS_FIELD, name, f"one of the models ({known}) in {where}")


def _shown(name: str) -> str:
    return quoted(name, MAX_SHOWN_NAME)

"""From the name that a request asks for to the models that may answer it. Pure.

name ─ split? ─> one model, drawn by weight ┐
     ─ model, alias ────────────────────────┴─> that model, its fallbacks, theirs ...

A split draws by weighted rendezvous hashing, always the same for the same requester: each model has a score from a hash
of its name and the requester, and the best one wins (Wang and Ravishankar, "Hash-based virtual hierarchies", with the
weights of Schindelhauer and Schomaker 2005). When a weight changes, requesters move only to the model that gained, or
from the one that lost.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from common.errors import ConfigError, ModelNotFound, quoted
from router.access import ANONYMOUS, ApiKey, Forbidden
from router.models.models_file import MODELS_FIELD, ModelEntry, ModelTable, Split

HASH_BYTES = 8
"""64 bits: more than a number from 0 to 1 holds."""
MAX_SHOWN_NAME = 100
"""Characters of a wrong model name that an error shows."""
MAX_SHOWN_NAMES = 32
"""Names of models that an error shows."""


def draw(weights: Mapping[str, float], split: str, requester: str) -> str:
    """The model of a requester, such as a user or a request's id. At least one weight is above 0."""
    return max(
        (name for name in weights if weights[name] > 0), key=lambda name: _score(name, split, requester, weights[name])
    )


def _score(name: str, split: str, requester: str, weight: float) -> float:
    digest = hashlib.blake2b(json.dumps([split, name, requester]).encode(), digest_size=HASH_BYTES).digest()
    even = (int.from_bytes(digest) + 0.5) / 2.0 ** (8 * HASH_BYTES)  # from 0 to 1
    return math.inf if even >= 1.0 else -weight / math.log(even)


@dataclass(frozen=True, slots=True)
class Listed:
    """A name under which clients find something: of the `model` itself, another name of it, or (no model) a split."""

    name: str
    model: str
    entry: ModelEntry | None = None
    split: Split | None = None


class Catalog:
    """The names of a router's models. `models` are their names, the default one first."""

    def __init__(self, table: ModelTable, model_ids: Sequence[str]) -> None:
        """`model_ids`: what each model of the table is by its own account. Raises ConfigError."""
        self.entries: dict[str, ModelEntry] = {}
        self._models: dict[str, str] = {}
        self._splits: dict[str, Split] = {}
        if len(set(model_ids)) < len(model_ids):
            twice = next(one for one in model_ids if model_ids.count(one) > 1)
            raise ConfigError("model", twice, "each model once: workers say by this name which one they serve")
        named = [(entry.name or model_id, entry) for entry, model_id in zip(table.models, model_ids, strict=True)]
        for name, entry in named:
            for each in (name, *entry.aliases):
                self._take(each, name)
            self.entries[name] = entry
        for split in table.splits:
            self._check_free(split.name)
            self._splits[split.name] = split
        for (name, entry), model_id in zip(named, model_ids, strict=True):
            for other in (model_id, entry.model):  # unless it was given to another model
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

    def listed(self, key: ApiKey = ANONYMOUS) -> Iterator[Listed]:
        """All that clients with this key may ask for: models, each followed by its aliases, then splits."""
        for name, entry in self.entries.items():
            for each in (name, *entry.aliases):
                if self.may_use(key, each):
                    yield Listed(each, name, entry=entry)
        for split in self._splits.values():
            if self.may_use(key, split.name):
                yield Listed(split.name, "", split=split)

    def may_use(self, key: ApiKey, name: str) -> bool:
        """Whether this key may ask for a known name: it, or all that it stands for, is on the key's list."""
        if not key.models or name in key.models:
            return True
        if (split := self._splits.get(name)) is not None:
            return all(self.may_use(key, model) for model, weight in split.weights.items() if weight > 0)
        model = self._models[name]
        return any(own in key.models and one == model for own, one in self._models.items())

    def chain(self, asked: str | None, key: ApiKey = ANONYMOUS, requester: str = "") -> tuple[str, ...]:
        """The models that may answer, the best first. Without a name the first that the key may use.

        Raises ModelNotFound for an unknown name, Forbidden for one that the key may not use.
        """
        if asked is None:
            asked = next((one.name for one in self.listed(key)), self.models[0])
        if asked not in self._models and asked not in self._splits:
            raise ModelNotFound(f"there is no model {_shown(asked)} here, only {self._names(key)}", param="model")
        if not self.may_use(key, asked):
            raise Forbidden(
                f"key {key.name!r} may not use model {_shown(asked)}, only {self._names(key)}",
                param="model",
            )
        split = self._splits.get(asked)
        first = self._models[asked] if split is None else draw(split.weights, split.name, requester)
        return (first, *(name for name in self._behind(first) if self.may_use(key, name)))

    def targets(self, asked: str) -> tuple[str, ...]:
        """The models that a known name stands for, without fallbacks."""
        if (split := self._splits.get(asked)) is None:
            return (self._models[asked],)
        return tuple(name for name, weight in split.weights.items() if weight > 0)

    def with_fallbacks(self, model: str) -> tuple[str, ...]:
        """The model and those that may answer in its place."""
        return (model, *self._behind(model))

    def own_names(self, model: str) -> frozenset[str]:
        """What a model calls itself, beside the names that were given to it."""
        return self._own_names[model]

    def is_model(self, name: str) -> bool:
        """Whether a known name stands for one model."""
        return name in self._models

    def has(self, name: str) -> bool:
        """Whether something is served under this name."""
        return name in self._models or name in self._splits

    def _behind(self, first: str) -> list[str]:
        """The fallbacks of a model, and theirs, each once; nearer ones first."""
        found: list[str] = []
        level = [first]
        while level:
            level = [self._models[name] for model in level for name in self.entries[model].fallbacks]
            level = [name for name in dict.fromkeys(level) if name != first and name not in found]
            found += level
        return found

    def _names(self, key: ApiKey) -> str:
        names = [repr(one.name) for one in self.listed(key)]
        more = f" and {len(names) - MAX_SHOWN_NAMES:,} more" if len(names) > MAX_SHOWN_NAMES else ""
        return (", ".join(names[:MAX_SHOWN_NAMES]) or "none") + more

    def _take(self, name: str, model: str) -> None:
        self._check_free(name)
        self._models[name] = model

    def _check_free(self, name: str) -> None:
        if self.has(name):
            raise ConfigError(MODELS_FIELD, name, "each name of a model, alias or split once")

    def _check_targets(self, table: ModelTable) -> None:
        for entry in table.models:
            self._check_known(entry.fallbacks, f"fallbacks of {entry.name or entry.model}")
        for split in table.splits:
            self._check_known(split.weights, f"weights of {split.name}")

    def _check_known(self, names: Mapping[str, float] | Sequence[str], where: str) -> None:
        for name in names:
            if name not in self._models:
                known = ", ".join(dict.fromkeys(self._models))
                raise ConfigError(MODELS_FIELD, name, f"{where}: only names of models ({known})")


def _shown(name: str) -> str:
    return quoted(name, MAX_SHOWN_NAME)

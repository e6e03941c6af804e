"""API keys and their rights. The router keeps only the SHA-256 of a key.

A ring looks digests up by a hash with a random key of its own, so that an attacker cannot choose the hash of a guess:
the time of a look-up says nothing about the keys, and does not depend on their number.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

SALT_BYTES, SECRET_BYTES = 16, 32
"""Of the digest of a cache group, and of the secret that a process draws for its own use."""


def digest_of(key: bytes) -> bytes:
    """The digest that stands for a key. A plain hash suffices for random keys; it would not for passwords."""
    return hashlib.sha256(key).digest()


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one key on one router; 0 is no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent_requests: int = 0


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A name and the digests of its secrets (two while one replaces the other).

    `admin` allows `/load` and `/reset_prefix_cache`, which concern every client. Its requests may be of these `classes`
    only, and are of the first unless they name another; without any they may be of every class. So may they ask for
    these `models`, by the names that clients use; without any for every model. `by_model` are limits at single models.
    """

    name: str
    digests: tuple[bytes, ...] = field(repr=False)
    limits: Limits = Limits()
    cache_group: str = ""
    admin: bool = False
    classes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    by_model: tuple[tuple[str, Limits], ...] = ()

    def limits_at(self, model: str) -> Limits:
        """Its limits at one model, beside its limits at all of them together."""
        return next((limits for name, limits in self.by_model if name == model), NO_LIMITS)

    def salt(self, own: str) -> str:
        """The salt of this key's prompts in the prefix caches; `own` is the client's `cache_salt`.

        It is derived from the key, so that no client can name the salt of another. A group never equals a key's name.
        """
        if not self.digests:
            return own
        source = ["group", self.cache_group, own] if self.cache_group else ["key", self.name, own]
        return hashlib.blake2b(json.dumps(source).encode(), digest_size=SALT_BYTES).hexdigest()


ANONYMOUS = ApiKey("", (), admin=True)
"""The key of every client of a router without keys."""


class KeyRing:
    """The keys that a router accepts."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self.keys = tuple(keys)
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._named = {key.name: key for key in self.keys}
        self._table = {self._blinded(digest): key for key in self.keys for digest in key.digests}

    def find(self, given: bytes) -> ApiKey | None:
        """The key with the secret `given`."""
        return self._table.get(self._blinded(digest_of(given)))

    def named(self, name: str) -> ApiKey | None:
        """The key of this name."""
        return self._named.get(name)

    def _blinded(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret).digest()

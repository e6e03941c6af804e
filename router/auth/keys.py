"""API keys: who may ask, what for, how much. Of a key only its SHA-256 is kept.

A ring looks digests up by a hash whose key is drawn at its start: how long a look takes tells nothing about keys, for
the hash of no guess can be chosen, and it does not depend on how many there are.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

SALT_BYTES, SECRET_BYTES = 16, 32


def digest_of(key: bytes) -> bytes:
    """What is kept of a key. A plain hash suffices for keys that a machine drew; people's passwords are no keys."""
    return hashlib.sha256(key).digest()


@dataclass(frozen=True, slots=True)
class Limits:
    """What one key may use on one router; 0 is no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent_requests: int = 0


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A name and the digests of the secrets that stand for it (two while one replaces the other).

    `admin` opens what concerns every client: `/load` and `/reset_prefix_cache`.
    """

    name: str
    digests: tuple[bytes, ...] = field(repr=False)
    limits: Limits = Limits()
    cache_group: str = ""
    admin: bool = False

    def salt(self, own: str) -> str:
        """What prompts of this key are salted with in the prefix caches; `own` is the client's own `cache_salt`.

        Always derived from the key, so that nobody can name the salt of another. A group never equals a key's name.
        """
        if not self.digests:
            return own
        source = ["group", self.cache_group, own] if self.cache_group else ["key", self.name, own]
        return hashlib.blake2b(json.dumps(source).encode(), digest_size=SALT_BYTES).hexdigest()


ANONYMOUS = ApiKey("", (), admin=True)
"""Every client of a router that asks for no key."""


class KeyRing:
    """The keys that a router accepts."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self.keys = tuple(keys)
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._table = {self._blinded(digest): key for key in self.keys for digest in key.digests}

    def find(self, given: bytes) -> ApiKey | None:
        """The key that `given` is the secret of."""
        return self._table.get(self._blinded(digest_of(given)))

    def _blinded(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret).digest()

"""API keys and their permissions. The router stores only the SHA-256 digests of keys.

A ring hashes digests with its own random key, so that an attacker cannot choose the hash of a guess. The time of a
lookup reveals nothing about the keys and does not depend on their number.

The file of `--api-key-file` is TOML, with one `[[key]]` table per client:

    [[key]]
    name = "alice"                 # shown in logs and metrics
    sha256 = "9f86d0...0f00a08"    # digest of the key; or key = "...", the key itself; a list while keys are rotated
    requests_per_minute = 60       # this and all following fields are optional
    tokens_per_minute = 100000
    concurrent_requests = 8
    cache_group = "team-a"         # keys of a group share cached prefixes
    admin = false                  # may use /load and /reset_prefix_cache
    classes = ["batch"]            # allowed request classes (--request-class); the first is the default
    models = ["small"]             # allowed models: names, aliases and splits of this or of other routers
    by_model.small = { tokens_per_minute = 1000 }   # limits for one model

Error messages never contain the value of `key` or `sha256`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import secrets
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from common.config import DEFAULT, RouterConfig
from common.errors import ConfigError, listed
from router.access.files import FileWatch, check_size, content_of
from router.siblings import AgreedFile, RouterPart

SALT_BYTES, SECRET_BYTES = 16, 32
"""Size of a cache group's digest, and of the random secret of a process."""
FIELD = "api_key_file"
MAX_FILE_BYTES = 4 * 1024 * 1024
"""Enough for ten thousand keys with individual limits."""
MAX_KEYS = 10_000
"""Limit because each key has its own counters and metric labels."""
MAX_SECRETS = 8
"""Maximum number of secrets per key: an old and a new one during rotation, for several groups of clients."""
MIN_KEY_CHARS, MAX_KEY_CHARS = 16, 512
"""Shorter secrets can be guessed; longer texts are not keys."""
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
PRINTABLE = re.compile(r"[!-~]+")
HEX = re.compile(r"[0-9A-Fa-f]{64}")
HEADER = re.compile(r"\s*\[\[\s*key\s*\]\]")
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
FIELDS = ("name", "key", "sha256", *LIMITS, "cache_group", "admin", "classes", "models", "by_model")
MAX_LIMIT = 10**12
"""Maximum of any limit. Higher numbers are as good as no limit."""
MAX_MODELS, MAX_MODEL_CHARS = 256, 256
"""Maximum number of models that one key names, and maximum length of a name in characters."""
AGREED_NAME = "keys.toml"
MAX_LISTED = 20
"""Maximum number of key names in a log line."""


def digest_of(key: bytes) -> bytes:
    """Return the digest of a key. A plain hash suffices for random keys, but not for passwords."""
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
    """A key's name, the digests of its secrets, and its permissions. It has several secrets during rotation.

    `admin` allows `/load` and `/reset_prefix_cache`, which affect all clients. `classes` are the allowed request
    classes, of which the first is the default; empty allows all. `models` are the allowed model names; empty allows
    all. `by_model` are limits for single models.
    """

    name: str
    digests: tuple[bytes, ...] = dataclasses.field(repr=False)
    limits: Limits = Limits()
    cache_group: str = ""
    admin: bool = False
    classes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    by_model: tuple[tuple[str, Limits], ...] = ()

    def limits_at(self, model: str) -> Limits:
        """Return the limits for one model, which apply in addition to the limits over all models."""
        return next((limits for name, limits in self.by_model if name == model), NO_LIMITS)

    def salt(self, own: str) -> str:
        """Return the salt of this key's prompts in prefix caches. `own` is the client's `cache_salt`.

        It is derived from the key, so that no client can use another's salt. A group never equals a key's name.
        """
        if not self.digests:
            return own
        source = ["group", self.cache_group, own] if self.cache_group else ["key", self.name, own]
        return hashlib.blake2b(json.dumps(source).encode(), digest_size=SALT_BYTES).hexdigest()


ANONYMOUS = ApiKey("", (), admin=True)
"""The key of all clients of a router without keys."""


class KeyRing:
    """The keys that a router accepts."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self.keys = tuple(keys)
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._named = {key.name: key for key in self.keys}
        self._table = {self._blinded(digest): key for key in self.keys for digest in key.digests}

    def find(self, given: bytes) -> ApiKey | None:
        """Return the key with the secret `given`, or None."""
        return self._table.get(self._blinded(digest_of(given)))

    def named(self, name: str) -> ApiKey | None:
        """Return the key of this name, or None."""
        return self._named.get(name)

    def changes_since(self, before: KeyRing) -> str:
        """Return the names of keys that differ from an earlier ring, for the log."""
        kept = self._named.keys() & before._named.keys()
        found = {
            "removed": before._named.keys() - kept,
            "added": self._named.keys() - kept,
            "other secrets for": {name for name in kept if self._named[name].digests != before._named[name].digests},
        }
        changes = [f"{what} {listed(sorted(names), MAX_LISTED)}" for what, names in found.items() if names]
        return "; ".join(changes) or "the same secrets"

    def _blinded(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret).digest()


def read_keys(path: str, classes: Collection[str] = (DEFAULT,), data: bytes | None = None) -> list[ApiKey]:
    """Read the keys of a file. `classes` are the configured request classes; `data` is the content, if already read.

    Raises ConfigError, with the line number if known.
    """
    data = content_of(FIELD, path, MAX_FILE_BYTES) if data is None else data
    check_size(FIELD, path, data, MAX_FILE_BYTES)
    try:
        text = data.decode("utf-8-sig")
        table = tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(FIELD, path, f"a valid TOML file ({_reason(error)})") from None
    return _Reader(path, text, classes).keys(table)


def ring_of(
    path: str, api_key: str, classes: Collection[str] = (DEFAULT,), data: bytes | None = None
) -> KeyRing | None:
    """Create the ring of the file's keys and the key of `--api-key`, named "default"; None without either.

    `data` is the content of the file, if already read. Raises ConfigError.
    """
    if not path and not api_key:
        return None
    own = [ApiKey("default", (digest_of(api_key.encode()),), admin=True)] if api_key else []
    keys = read_keys(path, classes, data) if path else []
    if own and any(key.name == "default" for key in keys):
        raise ConfigError(FIELD, path, 'a file without a key named "default", the name of the key of --api-key')
    return KeyRing([*own, *keys])


def _reason(error: ValueError) -> str:
    """Return the parser's message, except for decoding errors, whose message contains bytes of the file."""
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)


class _Reader:
    """Parser of the key file's tables. Its errors give the line number."""

    def __init__(self, path: str, text: str, classes: Collection[str]) -> None:
        self._path, self._classes = path, classes
        self._lines = text.splitlines()
        self._starts = [number for number, line in enumerate(self._lines, 1) if HEADER.match(line)]

    def keys(self, table: Mapping[str, Any]) -> list[ApiKey]:
        entries = table.get("key")
        unknown = sorted(set(table) - {"key"})
        if unknown:
            raise ConfigError(FIELD, self._path, f"a file of [[key]] tables, without {unknown[0]!r}")
        if not isinstance(entries, list) or not entries:
            raise ConfigError(
                FIELD, self._path, "a file with at least one [[key]] table; `diptych api-key NAME` prints one"
            )
        if len(entries) > MAX_KEYS:
            raise ConfigError(FIELD, self._path, f"a file with at most {MAX_KEYS:,} keys, not {len(entries):,}")
        names: set[str] = set()
        secrets: set[bytes] = set()
        keys = []
        for index, entry in enumerate(entries):
            key = self._key(index, entry)
            if key.name in names:
                self._refuse(index, "name", f"a unique name; {key.name!r} is used above")
            if not secrets.isdisjoint(key.digests):
                self._refuse(index, "sha256", f"a unique key; {key.name!r} uses it above")
            names.add(key.name)
            secrets.update(key.digests)
            keys.append(key)
        return keys

    def _key(self, index: int, entry: object) -> ApiKey:
        if not isinstance(entry, dict):
            self._refuse(index, "", "[[key]] tables")
        for field in entry:
            if field not in FIELDS:
                self._refuse(index, field, f"only {', '.join(FIELDS)}")
        name = entry.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            self._refuse(index, "name", "a name of up to 64 letters, digits and . _ -")
        group = entry.get("cache_group", "")
        if not isinstance(group, str) or (group and not NAME.fullmatch(group)):
            self._refuse(index, "cache_group", "a cache_group of up to 64 letters, digits and . _ -")
        admin = entry.get("admin", False)
        if not isinstance(admin, bool):
            self._refuse(index, "admin", "admin = true or false")
        limits = Limits(**{field: self._limit(index, field, entry.get(field, 0)) for field in LIMITS})
        classes, models = self._key_classes(index, entry), self._key_models(index, entry)
        by_model = self._by_model(index, entry.get("by_model", {}))
        return ApiKey(name, self._digests(index, entry), limits, group, admin, classes, models, by_model)

    def _by_model(self, index: int, given: object) -> tuple[tuple[str, Limits], ...]:
        allowed = f"a table of up to {MAX_MODELS} models, each with {', '.join(LIMITS)}"
        if not isinstance(given, dict) or len(given) > MAX_MODELS:
            self._refuse(index, "by_model", allowed)
        found = []
        for model, limits in given.items():
            if not isinstance(limits, dict) or not limits or limits.keys() - set(LIMITS):
                self._refuse(index, "by_model", allowed)
            checked = {field: self._limit(index, "by_model", value) for field, value in limits.items()}
            found.append((model, Limits(**checked)))
        return tuple(found)

    def _key_models(self, index: int, entry: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the allowed models. Unknown names are valid, because routers of other models may share the file."""
        given = entry.get("models")
        if given is None:
            return ()
        fits = isinstance(given, list) and 0 < len(given) <= MAX_MODELS
        if not fits or not all(isinstance(name, str) and 0 < len(name) <= MAX_MODEL_CHARS for name in given):
            self._refuse(index, "models", f"a list of 1 to {MAX_MODELS} model names")
        return tuple(dict.fromkeys(given))

    def _key_classes(self, index: int, entry: Mapping[str, Any]) -> tuple[str, ...]:
        given = entry.get("classes")
        if given is None:
            return ()
        known = isinstance(given, list) and all(isinstance(name, str) and name in self._classes for name in given)
        if not known or not given:
            self._refuse(index, "classes", f"a list of classes from {', '.join(self._classes)}")
        return tuple(dict.fromkeys(given))

    def _digests(self, index: int, entry: Mapping[str, Any]) -> tuple[bytes, ...]:
        digests: list[bytes] = []
        for field in ("key", "sha256"):
            given = entry.get(field, [])
            for secret in given if isinstance(given, list) else [given]:
                if not isinstance(secret, str):
                    self._refuse(index, field, "a string, or a list of strings")
                digests.append(self._digest(index, field, secret))
        if not 1 <= len(digests) <= MAX_SECRETS:
            self._refuse(index, "sha256", f"1 to {MAX_SECRETS} values of sha256 or key")
        return tuple(digests)

    def _digest(self, index: int, field: str, secret: str) -> bytes:
        if field == "sha256":
            if not HEX.fullmatch(secret):
                self._refuse(index, field, f"a sha256 of 64 hexadecimal digits, got {len(secret)} characters")
            return bytes.fromhex(secret)
        if not MIN_KEY_CHARS <= len(secret) <= MAX_KEY_CHARS or not PRINTABLE.fullmatch(secret):
            allowed = f"a key of {MIN_KEY_CHARS} to {MAX_KEY_CHARS} printable ASCII characters without spaces"
            self._refuse(index, field, f"{allowed}, got {len(secret)} characters")
        return digest_of(secret.encode())

    def _limit(self, index: int, field: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_LIMIT:
            self._refuse(index, field, f"a whole number from 0 (no limit) for {field}")
        return value

    def _refuse(self, index: int, field: str, allowed: str) -> NoReturn:
        raise ConfigError(
            FIELD, self._path, f"a file with valid entries; {self._where(index, field)} must have {allowed}"
        ) from None

    def _where(self, index: int, field: str) -> str:
        """Return the line of a field of entry `index`, or of its header; "key N" if tables are written differently."""
        if index >= len(self._starts):
            return f"key {index + 1}"
        start = self._starts[index]
        end = self._starts[index + 1] if index + 1 < len(self._starts) else len(self._lines) + 1
        lines = (number for number in range(start, end) if self._lines[number - 1].split("=")[0].strip() == field)
        return f"line {next(lines, start)}"


class KeySource:
    """Loads and reloads the key ring. `ring` is set from the start. All methods read files and raise ConfigError.

        the file ── two equal reads ──> one process accepts it ── agreed copy ──> the others, at their next poll

    A restarted process uses the agreed copy, even if the file has since changed to content that all processes reject.
    """

    def __init__(self, config: RouterConfig, part: RouterPart | None = None) -> None:
        self._config, self._path = config, config.api_key_file
        self._agreed = AgreedFile(part, AGREED_NAME) if part is not None and self._path else None
        self._changed, self._refused = False, b""
        content = self._agreed.read() if self._agreed is not None else None
        if self._path:  # the watch begins before the file is read, so that it misses no change
            self.watch: FileWatch | None = FileWatch([self._path], known=content)
            self._content = content_of(FIELD, self._path, MAX_FILE_BYTES) if content is None else content
        else:
            self.watch, self._content = None, b""
        self.ring: KeyRing | None = self._ring_of(self._content)
        self._accept()

    def look(self) -> bool:
        """Whether there is new content to `read`: the file changed, or a sibling process accepted new content."""
        if self.watch is None:
            return False
        self._changed = self.watch.look()
        return self._changed or self._other() is not None

    def read(self) -> KeyRing | None:
        """Load the changed file, or else the content that a sibling process accepted."""
        content = None if self._changed else self._other()
        if content is None:
            content = content_of(FIELD, self._path, MAX_FILE_BYTES)
        try:
            self.ring = self._ring_of(content)
        except Exception:
            self._refused = content
            raise
        self._content = content
        self._accept()
        return self.ring

    # ------------------------------------------------------------ inside

    def _ring_of(self, content: bytes) -> KeyRing | None:
        config = self._config
        return ring_of(self._path, config.api_key, config.classes, content)

    def _other(self) -> bytes | None:
        """Return content that a sibling process accepted and this one has not read; None if there is none."""
        agreed = self._agreed.read() if self._agreed is not None else None
        return None if agreed in (self._content, self._refused) else agreed

    def _accept(self) -> None:
        """Publish the content that was read last as the agreed copy."""
        if self._agreed is not None and self._agreed.read() != self._content:
            self._agreed.agree(self._content)

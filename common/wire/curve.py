"""CURVE, ZeroMQ's encryption and mutual authentication, for all sockets between processes.

A process has one key pair. It trusts its own public key and those in an authorised list: it accepts connections from,
and connects to, only processes with trusted keys. Processes that share one key pair need no list. To rotate a cluster's
key, list both keys for a while. See docs/guides/secure.md.

A key pair is a small TOML file with `public` and `secret` in ZeroMQ's 40-character encoding (Z85). The list contains
one public key per line, optionally followed by the name of its owner. Lines that begin with "# " are comments. Error
messages never contain a secret key.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.utils import z85

from common.errors import ConfigError

KEY_CHARACTERS, KEY_BYTES = 40, 32
"""Length of a key in Z85 and in bytes, from ZeroMQ's CURVE."""
_PAIR_RULE = "a file written by `diptych keygen`"
_HEADER = """\
# CURVE key pair of Diptych. Keep this file secret: any program with the secret key can impersonate your processes.
# The public key is not secret; `diptych keygen --public FILE` prints it.
"""
log = logging.getLogger(__name__)
ZAP_DOMAIN = b"diptych"
OWN = "this process's own key"

AnySocket = zmq.Socket[bytes] | zmq.asyncio.Socket


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and its secret key, 40 characters each."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> KeyPair:
        return cls(*zmq.curve_keypair())


def is_key(text: str) -> bool:
    """Return whether `text` is a 32-byte key in Z85."""
    try:
        return len(text) == KEY_CHARACTERS and len(z85.decode(text)) == KEY_BYTES
    except (ValueError, KeyError, struct.error):  # not ASCII; invalid character; more than 32 bits in 5 characters
        return False


def read_key_pair(path: str) -> KeyPair:
    """Read a key pair from a file. Raises ConfigError, which never contains the secret key."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("curve_key", path, f"{_PAIR_RULE} ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError("curve_key", path, f"{_PAIR_RULE}; this one is not TOML") from error
    for name in ("public", "secret"):
        value = table.get(name)
        if not isinstance(value, str) or not is_key(value):
            state = f"has {len(value)} characters" if isinstance(value, str) else "is missing"
            rule = f"{_PAIR_RULE}: its {name} key {state}, but a key has 40 characters of Z85"
            raise ConfigError("curve_key", path, rule)
    pair = KeyPair(table["public"].encode(), table["secret"].encode())
    if zmq.curve_public(pair.secret) != pair.public:
        raise ConfigError("curve_key", path, f"{_PAIR_RULE}: its public and secret key do not match")
    return pair


def write_key_pair(path: str, pair: KeyPair, *, force: bool = False) -> None:
    """Write a key pair with mode 0600. Raises FileExistsError unless `force`, or OSError."""
    text = f'{_HEADER}public = "{pair.public.decode()}"\nsecret = "{pair.secret.decode()}"\n'
    target = f"{path}.{os.getpid()}.new" if force else path
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
    if force:
        os.replace(target, path)


def others_may_read(path: str) -> bool:
    """Return whether the file's group or all users can read it."""
    return bool(os.stat(path).st_mode & (stat.S_IRGRP | stat.S_IROTH))


def read_authorized(path: str) -> dict[bytes, str]:
    """Read authorised public keys and the names of their owners, "" if unnamed. Raises ConfigError with the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError("curve_authorized", path, f"a list of public keys ({why})") from error
    keys: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        key, _, comment = line.strip().partition(" ")
        if not key or key == "#":  # a key may begin with "#" too, but is longer
            continue
        if not is_key(key):
            shown = f"line {number}, {key[:8]}... of {len(key)} characters," if len(key) > 8 else f"line {number}"
            rule = (
                f'a list of public keys of 40 characters each, one per line, or comments after "# "; {shown} is neither'
            )
            raise ConfigError("curve_authorized", path, rule)
        keys[key.encode()] = comment.strip()
    return keys


class Curve:
    """Keys of this process. Thread-safe. The authorised list is reloaded whenever it changes."""

    def __init__(self, pair: KeyPair, authorized_file: str = "") -> None:
        """Raises ConfigError for an invalid list."""
        self._pair, self._path = pair, authorized_file
        self._stamp = _stamp_of(authorized_file)
        self._trusted = self._with_own(read_authorized(authorized_file) if authorized_file else {})

    @classmethod
    def load(cls, key_file: str, authorized_file: str = "") -> Curve | None:
        """Load the configured keys; None without any. Raises ConfigError."""
        if not key_file:
            return None
        if not zmq.has("curve"):
            raise ConfigError("curve_key", key_file, "empty, because this libzmq was built without CURVE")
        return cls(read_key_pair(key_file), authorized_file)

    def trusted(self) -> Mapping[bytes, str]:
        """Return trusted public keys and their owners, this process's own first."""
        if self._path:
            self._read_again()
        return self._trusted

    def serve(self, socket: AnySocket) -> None:
        """Configure a socket before `bind` to accept only keys that the gatekeeper of its context trusts."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self._pair.secret)
        socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # reject all connections without a gatekeeper

    def expect(self, socket: AnySocket, server_key: bytes) -> None:
        """Configure a socket before `connect`: accept only the owner of `server_key`, present this process's key."""
        socket.set(zmq.CURVE_SERVERKEY, server_key)
        socket.set(zmq.CURVE_PUBLICKEY, self._pair.public)
        socket.set(zmq.CURVE_SECRETKEY, self._pair.secret)

    def _with_own(self, authorized: Mapping[bytes, str]) -> Mapping[bytes, str]:
        return {self._pair.public: OWN} | {key: whose or "an authorised key" for key, whose in authorized.items()}

    def _read_again(self) -> None:
        stamp = _stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._trusted = self._with_own(read_authorized(self._path))
            log.info("curve: reloaded %s: %d public keys are trusted", self._path, len(self._trusted))
        except ConfigError as error:
            log.error("curve: cannot reload the authorised keys, keeping the previous ones: %s", error)


def _stamp_of(path: str) -> tuple[int, int, int] | None:
    """Return a value that changes when the file is changed or replaced; None if it cannot be read."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_ino, found.st_size)


def warn_if_readable(key_file: str) -> None:
    """Log a warning if other users can read the secret key, which some containers cannot avoid."""
    if key_file and others_may_read(key_file):
        log.warning("curve: other users can read the secret key in %s: run chmod 600 on it", key_file)

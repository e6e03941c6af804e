"""CURVE, ZeroMQ's encryption and mutual authentication, for every socket between processes.

A process has one key pair and trusts its own public key and those of an authorised list: processes with a trusted key
may connect to it, and it connects to no others. Processes that share one pair need no list. To change a cluster's key,
the list holds both keys for a while. See docs/guides/secure.md.

A pair is a small TOML file with `public` and `secret`, in ZeroMQ's 40-character form (Z85). The list has one public key
a line and may name its owner behind it; lines that begin with "# " are comments. No error message shows a secret key.
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
"""Of a key in Z85, and as bytes: ZeroMQ's CURVE."""
_PAIR_RULE = "a file that `diptych keygen` wrote"
_HEADER = """\
# A CURVE key pair of Diptych. Keep this file secret: with the secret key, any program passes for one of your processes.
# The public key is no secret; `diptych keygen --public FILE` prints it.
"""
log = logging.getLogger(__name__)
ZAP_DOMAIN = b"diptych"
OWN = "this process's own key"

AnySocket = zmq.Socket[bytes] | zmq.asyncio.Socket


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and the secret that belongs to it, 40 characters each."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> KeyPair:
        return cls(*zmq.curve_keypair())


def is_key(text: str) -> bool:
    """Whether `text` is 32 bytes in ZeroMQ's printable form."""
    try:
        return len(text) == KEY_CHARACTERS and len(z85.decode(text)) == KEY_BYTES
    except (ValueError, KeyError, struct.error):  # not ASCII; not of the alphabet; more than 32 bits in 5 characters
        return False


def read_key_pair(path: str) -> KeyPair:
    """The pair in a file. Raises ConfigError, which never shows the secret."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("curve_key", path, f"{_PAIR_RULE} ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError("curve_key", path, f"{_PAIR_RULE}; this one is not TOML") from error
    for name in ("public", "secret"):
        value = table.get(name)
        if not isinstance(value, str) or not is_key(value):
            size = f"{len(value)} characters" if isinstance(value, str) else "none"
            rule = f"{_PAIR_RULE}: its {name} key has {size}, a key is 40 characters of Z85"
            raise ConfigError("curve_key", path, rule)
    pair = KeyPair(table["public"].encode(), table["secret"].encode())
    if zmq.curve_public(pair.secret) != pair.public:
        raise ConfigError("curve_key", path, f"{_PAIR_RULE}: its public key does not belong to its secret key")
    return pair


def write_key_pair(path: str, pair: KeyPair, *, force: bool = False) -> None:
    """Write a pair for its owner's eyes only (mode 0600). Raises FileExistsError unless `force`, or OSError."""
    text = f'{_HEADER}public = "{pair.public.decode()}"\nsecret = "{pair.secret.decode()}"\n'
    target = f"{path}.{os.getpid()}.new" if force else path
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
    if force:
        os.replace(target, path)


def others_may_read(path: str) -> bool:
    """Whether the file's group or all users may read it."""
    return bool(os.stat(path).st_mode & (stat.S_IRGRP | stat.S_IROTH))


def read_authorized(path: str) -> dict[bytes, str]:
    """Public keys and the owner that the list names for each, or "". Raises ConfigError naming the line."""
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
            rule = f'one public key of 40 characters a line, or "# " and a comment; {shown} is neither'
            raise ConfigError("curve_authorized", path, rule)
        keys[key.encode()] = comment.strip()
    return keys


class Curve:
    """This process's keys. Sockets of any thread may use it; the authorised list is read again whenever it changes."""

    def __init__(self, pair: KeyPair, authorized_file: str = "") -> None:
        """Raises ConfigError for a bad list."""
        self._pair, self._path = pair, authorized_file
        self._stamp = _stamp_of(authorized_file)
        self._trusted = self._with_own(read_authorized(authorized_file) if authorized_file else {})

    @classmethod
    def load(cls, key_file: str, authorized_file: str = "") -> Curve | None:
        """The keys that the settings name; None when they name none. Raises ConfigError."""
        if not key_file:
            return None
        if not zmq.has("curve"):
            raise ConfigError("curve_key", key_file, "empty, for this libzmq was built without CURVE")
        return cls(read_key_pair(key_file), authorized_file)

    def trusted(self) -> Mapping[bytes, str]:
        """Public keys that may be at the other end of a connection, and their owners; this process's own first."""
        if self._path:
            self._read_again()
        return self._trusted

    def serve(self, socket: AnySocket) -> None:
        """Before `bind`: admit only keys that the gatekeeper of the socket's context trusts."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self._pair.secret)
        socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a gatekeeper, refuse every connection

    def expect(self, socket: AnySocket, server_key: bytes) -> None:
        """Before `connect`: talk only to the owner of `server_key`, and show it this process's key."""
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
            log.info("%s was read again: %d public keys are trusted", self._path, len(self._trusted))
        except ConfigError as error:
            log.error("the trusted keys stay as they were: %s", error)


def _stamp_of(path: str) -> tuple[int, int, int] | None:
    """Differs once the file was changed or replaced; None if it cannot be read."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_ino, found.st_size)


def warn_of_readers(key_file: str) -> None:
    """Log a warning when others than the owner may read the secret key. Some containers cannot avoid that."""
    if key_file and others_may_read(key_file):
        log.warning("%s holds a secret key and may be read by others than its owner (chmod 600 changes that)", key_file)

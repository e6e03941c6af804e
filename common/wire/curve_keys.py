"""CURVE key files: a process's own pair, and the list of other public keys it trusts.

A pair is a small TOML file with `public` and `secret`, in ZeroMQ's 40-character form (Z85). The list has one public key
a line and may name its owner behind it; lines that begin with "# " are comments. No error message shows a secret key.
"""

from __future__ import annotations

import os
import stat
import struct
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from common.errors import ConfigError

KEY_CHARACTERS, KEY_BYTES = 40, 32
"""Of a key in Z85, and as bytes: ZeroMQ's CURVE."""
_PAIR_RULE = "a file that `diptych keygen` wrote"
_HEADER = """\
# A CURVE key pair of Diptych. Keep this file secret: with the secret key, any program passes for one of your processes.
# The public key is no secret; `diptych keygen --public FILE` prints it.
"""


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

"""CURVE, ZeroMQ's encryption and mutual authentication, for every socket between processes.

A process has one key pair and trusts its own public key and those of an authorised list: processes with a trusted key
may connect to it, and it connects to no others. Processes that share one pair need no list. To change a cluster's key,
the list holds both keys for a while. See docs/security.md.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import zmq
import zmq.asyncio

from common.errors import ConfigError
from common.wire.curve_keys import KeyPair, others_may_read, read_authorized, read_key_pair

log = logging.getLogger(__name__)
ZAP_DOMAIN = b"diptych"
OWN = "this process's own key"

AnySocket = zmq.Socket[bytes] | zmq.asyncio.Socket


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

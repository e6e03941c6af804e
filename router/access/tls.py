"""Certificate of the HTTP server: checked at start, and reloaded when its files change.

The listening context passes each new connection to the context of the newest certificate. Open connections keep theirs.
A certificate that is about to expire is logged once a day.
"""

from __future__ import annotations

import _ssl
import logging
import math
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NoReturn

from common.errors import ConfigError

CERT, KEY = "tls_cert", "tls_key"
DAY = timedelta(days=1)
RENEW = 14 * DAY
"""Remaining time from which on the expiry is logged, once a day. The alert DiptychCertificateExpires has the same."""
log = logging.getLogger(__name__)


class Certificate:
    """A certificate chain and private key in PEM files. The server listens with `context`. Raises ConfigError.

    `clock` returns Unix time. `expires_at` is in Unix seconds.
    """

    def __init__(self, cert: str, key: str, clock: Callable[[], float] = time.time) -> None:
        self._cert, self._key, self._clock = cert, key, clock
        self.context = self._newest = load_context(cert, key)
        self.context.sni_callback = self._choose
        self.expires_at = expiry_of(cert)
        self._logged_at = -math.inf
        self.log_expiry()

    @property
    def left_s(self) -> float:
        """Seconds until the certificate expires, negative afterwards."""
        return self.expires_at - self._clock()

    def log_expiry(self) -> None:
        """Log a certificate that has expired or is about to, at most once a day."""
        now, left = self._clock(), timedelta(seconds=self.left_s)
        if left > RENEW or now - self._logged_at < DAY.total_seconds():
            return
        self._logged_at = now
        at = datetime.fromtimestamp(self.expires_at, UTC).isoformat(timespec="minutes")
        days = left / DAY
        if days > 0:
            log.warning("TLS certificate %s expires in %.1f days, at %s: renew the file", self._cert, days, at)
        else:
            log.error("TLS certificate %s expired %.1f days ago, at %s: renew the file", self._cert, -days, at)

    async def reload(self) -> None:
        """Reload the files. Raises ConfigError, and then keeps the current certificate.

        Each certificate gets a new context. If loading failed between the two files, because they are being replaced,
        the listening context would otherwise have the certificate of one and the key of the other.
        """
        self._newest, self.expires_at = load_context(self._cert, self._key), expiry_of(self._cert)
        self._logged_at = -math.inf
        self.log_expiry()

    def _choose(self, handshake: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Select the context of a connection. OpenSSL calls this at each ClientHello, even without a host name."""
        handshake.context = self._newest


def load_context(cert: str, key: str) -> ssl.SSLContext:
    """Create a server context for TLS 1.2 or newer. Raises ConfigError."""
    if b"-----BEGIN CERTIFICATE-----" not in _read(CERT, cert):
        raise ConfigError(CERT, cert, "a file with a PEM certificate")
    text = _read(KEY, key)
    if b"PRIVATE KEY-----" not in text:
        raise ConfigError(KEY, key, "a file with a PEM private key")
    if b"ENCRYPTED" in text:
        raise ConfigError(KEY, key, "a private key without a passphrase")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key, _no_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(KEY, key, f"the private key of the certificate in {cert}") from None
        raise ConfigError(CERT, cert, f"a valid certificate with its key ({error.reason})") from None
    except OSError as error:
        raise ConfigError(CERT, cert, f"a readable file ({error.strerror})") from error
    return context


def expiry_of(cert: str) -> float:
    """Return when the first certificate of a PEM file expires, in Unix seconds. Raises ConfigError."""
    try:
        decoded = _ssl._test_decode_cert(cert)  # type: ignore[attr-defined] # the only decoder of Python's library
        return ssl.cert_time_to_seconds(decoded["notAfter"])
    except (ssl.SSLError, OSError) as error:  # the file has changed since it was loaded
        raise ConfigError(CERT, cert, f"a valid certificate ({error.strerror})") from error


def _read(field: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except OSError as error:
        raise ConfigError(field, path, f"a readable file ({error.strerror})") from error


def _no_passphrase() -> NoReturn:
    """Refuse an encrypted key. Otherwise OpenSSL would ask for its passphrase on the terminal."""
    raise ConfigError(KEY, "", "a private key without a passphrase")

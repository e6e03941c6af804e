"""Certificate of the HTTP server: checked at start, and reloaded when its files change.

The listening context passes each new connection to the context of the newest certificate. Open connections keep theirs.
"""

from __future__ import annotations

import ssl
from typing import NoReturn

from common.errors import ConfigError

CERT, KEY = "tls_cert", "tls_key"


class Certificate:
    """A certificate chain and private key in PEM files. The server listens with `context`. Raises ConfigError."""

    def __init__(self, cert: str, key: str) -> None:
        self._cert, self._key = cert, key
        self.context = self._newest = load_context(cert, key)
        self.context.sni_callback = self._choose

    async def reload(self) -> None:
        """Reload the files. Raises ConfigError, and then keeps the current certificate.

        Each certificate gets a new context. If loading failed between the two files, because they are being replaced,
        the listening context would otherwise have the certificate of one and the key of the other.
        """
        self._newest = load_context(self._cert, self._key)

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


def _read(field: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except OSError as error:
        raise ConfigError(field, path, f"a readable file ({error.strerror})") from error


def _no_passphrase() -> NoReturn:
    """Refuse an encrypted key. Otherwise OpenSSL would ask for its passphrase on the terminal."""
    raise ConfigError(KEY, "", "a private key without a passphrase")

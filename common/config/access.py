"""Settings of the router's HTTP front: who may use it, and how much."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.field import FILE, Config, setting
from common.errors import ConfigError


@dataclass(frozen=True)
class AccessSettings(Config):
    """Keys, TLS, the audit log, and bounds on connections."""

    api_key_file: str = setting(
        "",
        "TOML file with API keys, their names and limits; read anew as it changes (`diptych api-key` makes an entry)",
        group="HTTP",
        **FILE,
    )
    tls_cert: str = setting(
        "",
        "PEM file with the certificate chain for https; read anew as it changes; empty: http",
        group="HTTP",
        **FILE,
    )
    tls_key: str = setting(
        "", "PEM file with the private key of --tls-cert, without a passphrase", group="HTTP", **FILE
    )
    audit_log: str = setting(
        "",
        "file (-: standard output) that gets a JSON line for each request that needs an API key: who, what, how much, "
        "how it ended; no prompts",
        group="HTTP",
        **FILE,
    )
    max_connections: int = setting(
        4096,
        "maximum open connections; one more evicts a connection that has been idle for 1 s, or gets 503",
        group="HTTP",
        ge=1,
        le=1_000_000,
    )
    header_timeout_s: float = setting(
        10.0, "seconds for a TLS handshake, and for the head of a request, to arrive", group="HTTP", ge=0.05, le=600
    )

    def check(self) -> None:
        super().check()
        for given, other, field in ((self.tls_cert, self.tls_key, "key"), (self.tls_key, self.tls_cert, "cert")):
            if given and not other:
                raise ConfigError(f"tls_{field}", "", "a file too when the other of --tls-cert and --tls-key is given")

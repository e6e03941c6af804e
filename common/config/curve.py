"""Settings of CURVE, the same for every process."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.field import Config, setting
from common.errors import ConfigError


@dataclass(frozen=True)
class CurveSettings(Config):
    """Which keys a process has and trusts."""

    curve_key: str = setting(
        "",
        "key pair of this process, written by `diptych keygen`: encrypts and authenticates (CURVE) every connection "
        "between processes; empty: neither",
        group="Sockets",
        metavar="FILE",
    )
    curve_authorized: str = setting(
        "",
        "list of further public keys to trust, one a line, of those who connect and of those connected to; read anew "
        "whenever it changes. The own key is always trusted",
        group="Sockets",
        metavar="FILE",
    )

    def check_curve(self) -> None:
        """Raises ConfigError."""
        if self.curve_authorized and not self.curve_key:
            raise ConfigError("curve_authorized", self.curve_authorized, "empty unless --curve-key is given")

    def check_curve_start(self) -> None:
        """Whether the files can be used. Raises ConfigError."""
        if self.curve_key:
            # Imported here: ZeroMQ is needed by none of the other checks.
            from common.wire.curve import Curve

            Curve.load(self.curve_key, self.curve_authorized)

"""Settings of every process but `serve`, which hands them on."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.field import FILE, Config, setting
from common.errors import ConfigError


@dataclass(frozen=True)
class ProcessConfig(Config):
    """Settings that every long-lived process has."""

    config: str = setting(
        "",
        "TOML file with settings; flags and environment win over it",
        group="Everywhere",
        in_file=False,
        **FILE,
    )
    log_level: str = setting(
        "info", "how much to log", group="Everywhere", choices=("debug", "info", "warning", "error")
    )
    log_json: bool = setting(False, "log one JSON object a line instead of text for people", group="Everywhere")


@dataclass(frozen=True)
class CommonConfig(ProcessConfig):
    """Settings that the router and the workers share."""

    curve_key: str = setting(
        "",
        "key pair of this process, written by `diptych keygen`: encrypts and authenticates (CURVE) every connection "
        "between processes; empty: neither",
        group="Sockets",
        **FILE,
    )
    curve_authorized: str = setting(
        "",
        "file with further public keys to trust at the other end of any connection, one a line; read anew whenever it "
        "changes. The process's own key is always trusted",
        group="Sockets",
        **FILE,
    )
    model: str = setting(
        "smollm2-135m",
        "built-in name (smollm2-135m, gemma3-270m), folder, .gguf file, or Hugging Face id (org/name, org/name:Q4_K_M)",
        group="Model",
        pattern=r".+",
        expects="a model name, folder or file",
        metavar="NAME",
        once="given once: a worker serves one model, and --models-file names several for a router or `diptych serve`",
    )
    task: str = setting(
        "auto",
        "what the model is served for; auto: embed for a folder with sentence-transformers' modules.json, score for a "
        "ForSequenceClassification architecture, else generate. With embed and score, prefill workers do everything",
        group="Model",
        choices=("auto", "generate", "embed", "score"),
    )
    heartbeat_s: float = setting(
        0.25,
        "seconds between the heartbeats that router and workers send each other",
        group="Deadlines",
        ge=0.01,
        le=10,
    )

    def check(self) -> None:
        super().check()
        if self.curve_authorized and not self.curve_key:
            raise ConfigError("curve_authorized", self.curve_authorized, "empty unless --curve-key is given")

    def check_silence(self, field: str) -> None:
        """Refuse a time of silence in which fewer than two heartbeats come. Raises ConfigError."""
        if getattr(self, field) < 2 * self.heartbeat_s:
            raise ConfigError(field, getattr(self, field), f"at least two heartbeats (2 x {self.heartbeat_s:g})")

    def check_start(self) -> None:
        super().check_start()
        if self.curve_key:
            # Imported here: no other check needs ZeroMQ.
            from common.wire import Curve

            Curve.load(self.curve_key, self.curve_authorized)

"""Settings that all processes share. `diptych serve` passes them to its child processes."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.field import FILE, Config, setting
from common.errors import ConfigError


@dataclass(frozen=True)
class ProcessConfig(Config):
    """Settings of every long-running process."""

    config: str = setting(
        "",
        "TOML file with settings",
        group="Configuration and logging",
        common=True,
        in_file=False,
        **FILE,
    )
    log_level: str = setting(
        "info",
        "minimum severity of log messages",
        group="Configuration and logging",
        choices=("debug", "info", "warning", "error"),
    )
    log_json: bool = setting(False, "log one JSON object per line instead of text", group="Configuration and logging")


@dataclass(frozen=True)
class CommonConfig(ProcessConfig):
    """Settings that the router and the workers share."""

    curve_key: str = setting(
        "",
        "file with the CURVE key pair that encrypts and authenticates connections between processes",
        group="Security",
        details="`diptych keygen` creates it.",
        default_note="no encryption",
        **FILE,
    )
    curve_authorized: str = setting(
        "",
        "file with additional trusted public keys, one per line",
        group="Security",
        details="It is reread when it changes.",
        **FILE,
    )
    model: str = setting(
        "smollm2-135m",
        "model to serve: a built-in name, a folder, a .gguf file or a Hugging Face ID",
        group="Model",
        details="Built-in: smollm2-135m and gemma3-270m. Hugging Face: org/name, or org/name:Q4_K_M for one file "
        "of a GGUF repository.",
        common=True,
        pattern=r".+",
        expects="a model name, folder or file",
        metavar="NAME",
        once="a worker serves one model, a router several with --models-file",
    )
    task: str = setting(
        "auto",
        "use of the model: generate text, embed text, or score pairs of texts",
        group="Model",
        details="`auto` selects embed for a folder with the modules.json of sentence-transformers, score for a "
        "ForSequenceClassification architecture, and otherwise generate. With embed and score, prefill workers serve "
        "all requests.",
        choices=("auto", "generate", "embed", "score"),
    )
    heartbeat_s: float = setting(
        0.25,
        "seconds between heartbeats of routers and workers",
        group="Timeouts",
        ge=0.01,
        le=10,
    )

    def check(self) -> None:
        super().check()
        if self.curve_authorized and not self.curve_key:
            raise ConfigError("curve_authorized", self.curve_authorized, "empty unless --curve-key is given")

    def check_silence(self, field: str) -> None:
        """Raise ConfigError if a timeout is shorter than two heartbeats."""
        if getattr(self, field) < 2 * self.heartbeat_s:
            raise ConfigError(field, getattr(self, field), f"at least two heartbeats (2 x {self.heartbeat_s:g})")

    def check_start(self) -> None:
        super().check_start()
        if self.curve_key:
            # Imported here because no other check needs ZeroMQ.
            from common.wire import Curve

            Curve.load(self.curve_key, self.curve_authorized)

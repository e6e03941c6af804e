"""Settings of every process but `serve`, which hands them on."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.curve import CurveSettings
from common.config.field import setting

HOST = r"[A-Za-z0-9_.:-]+"
"""A host name or an IP address."""


@dataclass(frozen=True)
class CommonConfig(CurveSettings):
    """What every process takes."""

    config: str = setting(
        "",
        "TOML file with settings; flags and environment win over it",
        group="Everywhere",
        metavar="FILE",
        in_file=False,
    )
    log_level: str = setting(
        "info", "how much to log", group="Everywhere", choices=("debug", "info", "warning", "error")
    )
    log_json: bool = setting(False, "log one JSON object a line instead of text for people", group="Everywhere")
    model: str = setting(
        "smollm2-135m",
        "built-in name (smollm2-135m, gemma3-270m), folder, .gguf file or Hugging Face id",
        group="Model",
        pattern=r".+",
        expects="a model name, folder or file",
        metavar="NAME",
    )
    heartbeat_s: float = setting(
        0.25,
        "seconds between the signs of life that router and workers send each other",
        group="Deadlines",
        ge=0.01,
        le=10,
    )

"""Settings that every long-lived process has."""

from __future__ import annotations

from typing import Any

from common.config.field import FILE, setting


def config_file() -> Any:
    return setting(
        "",
        "TOML file with settings; flags and environment win over it",
        group="Everywhere",
        in_file=False,
        **FILE,
    )


def log_level() -> Any:
    return setting("info", "how much to log", group="Everywhere", choices=("debug", "info", "warning", "error"))


def log_json() -> Any:
    return setting(False, "log one JSON object a line instead of text for people", group="Everywhere")

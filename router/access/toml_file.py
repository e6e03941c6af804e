"""TOML files of operators, bounded and checked before anything is taken from them."""

from __future__ import annotations

import tomllib
from typing import Any

from common.errors import ConfigError


def content_of(field: str, path: str, max_bytes: int) -> bytes:
    """The bytes of a setting's file, which may be too long by one. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(field, path, f"a file that can be read ({error.strerror})") from error


def check_size(field: str, path: str, data: bytes, max_bytes: int) -> None:
    """Raises ConfigError for content that is too long."""
    if len(data) > max_bytes:
        raise ConfigError(field, path, f"a file of at most {max_bytes:,} bytes")


def table_of(field: str, path: str, data: bytes, max_bytes: int) -> dict[str, Any]:
    """What the content of a file says. Raises ConfigError for too long content, and for what is no TOML."""
    check_size(field, path, data, max_bytes)
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except ValueError as error:
        raise ConfigError(field, path, f"a valid TOML file ({error})") from error

"""A command's input in a TOML or JSON file: read, and checked against a struct; errors name the field."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from common.errors import ConfigError, UsageError

T = TypeVar("T", bound=msgspec.Struct)


def read_table(path: Path, name: str) -> dict[str, Any]:
    """Return the table in a `.toml` or `.json` file, unchecked. Raises UsageError for the argument `name`."""
    kind, parse = ("TOML", tomllib.loads) if path.suffix == ".toml" else ("JSON", json.loads)
    try:
        values = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(name, f"cannot read {path}: no such file") from error
    except OSError as error:
        raise UsageError(name, f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(name, f"{path} is not valid {kind}: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(name, f"{path} has no table")
    return values


def converted(values: Any, kind: type[T], name: str) -> T:
    """Decoded TOML or JSON as a `kind`. Raises ConfigError with the field, its value and what is allowed."""
    try:
        return msgspec.convert(values, kind, strict=True)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `")
        field = where.rstrip("`").removeprefix("$").lstrip(".") or name
        if not problem.startswith("Expected "):  # an unknown or missing field
            raise UsageError(field, f"invalid {field}: {problem[:1].lower()}{problem[1:]}") from error
        allowed = problem.removeprefix("Expected ").partition(", got ")[0]
        raise ConfigError(field, _value_at(values, field), allowed) from error


def _value_at(values: Any, field: str) -> Any:
    """What a path such as `pool[0].count` leads to; None where it leads to nothing."""
    for key, index in re.findall(r"([A-Za-z_]\w*)|\[(\d+)\]", field):
        try:
            values = values[key] if key else values[int(index)]
        except (KeyError, IndexError, TypeError):
            return None
    return values

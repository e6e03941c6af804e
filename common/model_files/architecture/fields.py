"""Typed access to the fields of a model's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ModelError, shown

MOST_LAYERS = 4096
"""Maximum number of layers. Limits the data that is allocated per layer."""


class FieldReader:
    """Reader of one document. Errors name the file, the field, its value and the expected value."""

    def __init__(self, fields: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self.fields, self.path, self.prefix = fields, path, prefix

    def number(self, name: str, default: float | None = None) -> float:
        value = self.fields.get(self.prefix + name)
        value = default if value is None else value
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
            return float(value)
        raise self.wrong(name, value, "a number")

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise self.wrong(name, value, "a positive number")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value) or not 0 < value < 2**31:
            raise self.wrong(name, value, "a positive whole number")
        return int(value)

    def whole(self, name: str, default: int | None = None) -> int:
        """Read a count that may be 0 or null. Otherwise like `count`."""
        return self.count(name, default) if self.fields.get(self.prefix + name, default) else 0

    def layers(self, name: str) -> int:
        """Read a number of layers."""
        if (value := self.count(name)) > MOST_LAYERS:
            raise self.wrong(name, value, f"at most {MOST_LAYERS:,} layers")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.fields.get(self.prefix + name)
        value = default if value is None else value
        if value not in (True, False):
            raise self.wrong(name, value, "true or false")
        return bool(value)

    def text(self, name: str, default: str = "") -> str:
        value = self.fields.get(self.prefix + name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """Read an object. Returns {} if the field is null or missing."""
        value = self.fields.get(self.prefix + name)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(name, value, "an object")
        return dict(value or {})

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """Read a list of `length` positive numbers."""
        values = self.fields.get(self.prefix + name)
        if not isinstance(values, list):
            raise self.wrong(name, values, f"{length} positive numbers")
        good = all(isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < 1e300 for v in values)
        if not good or len(values) != length:
            held = f"a list of {len(values)}"
            raise ModelError(f"{self.path}: {self.prefix}{name} is {held}, expected {length} positive numbers")
        return tuple(float(value) for value in values)

    def wrong(self, name: str, value: object, expected: str) -> ModelError:
        """Return the error for a field of a wrong type or out of range."""
        return ModelError(
            f"{self.path}: {self.prefix}{name} is {shown(value)}, expected {expected}: fetch the file again"
        )

    def refuse(self, what: str, supported: str) -> ModelError:
        return ModelError(f"{self.path}: {what} is not supported: use a model with {supported}")

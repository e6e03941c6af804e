"""Typed access to the numbers of a model's description."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ModelError


class FieldReader:
    """Reads one document; every failure names the file, the field and what was expected."""

    def __init__(self, fields: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self.fields, self.path, self.prefix = fields, path, prefix

    def number(self, name: str, default: float | None = None) -> float:
        value = self.fields.get(self.prefix + name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"{self.path}: {self.prefix}{name} is {value!r}, expected a number: fetch the file again")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if not 0 < value < float("inf"):
            raise ModelError(f"{self.path}: {self.prefix}{name} is {value!r}, expected a positive number")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value) or not 0 < value < 2**31:
            raise ModelError(f"{self.path}: {self.prefix}{name} is {value!r}, expected a positive whole number")
        return int(value)

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive numbers."""
        values = self.fields.get(self.prefix + name)
        good = isinstance(values, list) and all(isinstance(v, int | float) and v > 0 for v in values)
        if not isinstance(values, list) or not good or len(values) != length:
            held = f"a list of {len(values)}" if isinstance(values, list) else repr(values)
            raise ModelError(f"{self.path}: {self.prefix}{name} is {held}, expected {length} positive numbers")
        return tuple(float(value) for value in values)

    def refuse(self, what: str, supported: str) -> ModelError:
        return ModelError(f"{self.path}: {what} is not supported: use a model with {supported}")

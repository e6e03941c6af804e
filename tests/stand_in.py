"""A backend of which a test replaces parts."""

from __future__ import annotations

from typing import Any


class StandIn:
    """Has `parts`, and all else that `other` has."""

    def __init__(self, other: Any, **parts: Any) -> None:
        self._other, self._parts = other, parts

    def __getattr__(self, name: str) -> Any:
        return self._parts[name] if name in self._parts else getattr(self._other, name)

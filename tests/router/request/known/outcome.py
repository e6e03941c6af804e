"""The outcome of a field: served, without effect on the answer, or refused; each with a request that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """`fields` are added to a valid request."""

    kind: Literal["served", "no effect", "refused"]
    fields: Fields


Table = dict[str, Outcome]


def served(**fields: Any) -> Outcome:
    return Outcome("served", fields)


def no_effect(**fields: Any) -> Outcome:
    """The answer is the same without the field, which is for accounts, bills, caches, or features of other servers."""
    return Outcome("no effect", fields)


def refused(**fields: Any) -> Outcome:
    """A 400 that names the field."""
    return Outcome("refused", fields)


def each(names: Iterable[str], place: str, outcome: Callable[[str], Outcome]) -> Table:
    """The same outcome for many values or variants: their names replace the braces in `place`."""
    return {place.format(name): outcome(name) for name in names}

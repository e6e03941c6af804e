"""One worker as discovery sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.wire import Role


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """`address` is a control address such as tcp://10.0.0.7:7001. `serving`: the worker passes its readiness probe.

    `terminating`: the worker is being ended, and its requests go on until then.
    """

    role: Role
    address: str
    serving: bool = True
    terminating: bool = False

    @property
    def withheld(self) -> str:
        """Why the worker gets no new work; "" when it may have some."""
        if self.terminating:
            return "is being ended"
        return "" if self.serving else "does not pass its readiness probe"

    @property
    def condition(self) -> str:
        """serving, terminating or unready: the label of a metric."""
        return "terminating" if self.terminating else "serving" if self.serving else "unready"


class Publish(Protocol):
    """Takes all present endpoints, in place of those before."""

    def __call__(self, endpoints: Sequence[Endpoint]) -> None: ...

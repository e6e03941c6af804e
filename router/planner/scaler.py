"""Interface for applying a plan. There are three ways:

gauges for an autoscaler     `diptych_pool_wanted_workers`, read by KEDA or an HPA: no scaler needed
Kubernetes                   the router sets the replicas of Deployments (`kubernetes_scaler.py`)
one machine                  `diptych serve --autoscale` reads the gauges (`router/cli/serve/autoscale.py`)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from common.wire import Role


@dataclass(frozen=True, slots=True)
class DeployedPools:
    """Deployed size of each pool, by role.

    `replicas` are the declared numbers, `unschedulable` of them have no node. `term` numbers this router's current
    term as leader; None if another router leads. Only the leader may scale, but every router may wake pools.
    """

    replicas: Mapping[Role, int] = field(default_factory=dict)
    unschedulable: Mapping[Role, int] = field(default_factory=dict)
    term: int | None = None


class Scaler(Protocol):
    """Applies a plan to the pools. Logs failures; the next plan tries again."""

    async def deployed(self) -> DeployedPools | None:
        """Compete for leadership, and return the deployed pools; None if they cannot be read."""
        ...

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        """Start and drain workers towards the wanted numbers. Returns within a few seconds."""
        ...

    async def wake(self, roles: Collection[Role]) -> None:
        """Start the first worker of those of the pools that have none."""
        ...

    async def yield_lead(self) -> None:
        """Let another router lead. This router leads again only if no other does."""
        ...

    async def resign(self) -> None:
        """Let another router lead, for good. The pools keep their size."""
        ...

    async def close(self) -> None:
        """Resign, and close connections."""
        ...

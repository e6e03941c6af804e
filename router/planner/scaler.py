"""Interface for applying a plan. There are three ways:

gauges for an autoscaler     `diptych_pool_wanted_workers`, read by KEDA or an HPA: no scaler needed
Kubernetes                   the router sets the replicas of Deployments (`kubernetes_scaler.py`)
one machine                  `diptych serve --autoscale` reads the gauges (`router/cli/serve/autoscale.py`)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from common.wire import Role


class Scaler(Protocol):
    """Applies a plan to the pools. Logs failures; the next plan tries again."""

    @property
    def unschedulable(self) -> Mapping[Role, int]:
        """Number of unschedulable workers by role."""
        ...

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        """Start and drain workers towards the wanted numbers. Returns within a few seconds."""
        ...

    async def close(self) -> None:
        """Close connections. The pools keep their size."""
        ...

"""Carries a plan out: by one of three ways.

gauges for an autoscaler     `diptych_pool_wanted_workers`: no scaler here, KEDA or an HPA reads them
Kubernetes                   the router sets the replicas of Deployments (`kubernetes_scaler.py`)
one machine                  `diptych serve --autoscale` reads the gauges (`router/cli/serve/autoscale.py`)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from common.wire import Role


class Scaler(Protocol):
    """Brings pools to the numbers that are wanted. A failure is the scaler's to log: the next plan tries again."""

    @property
    def unschedulable(self) -> Mapping[Role, int]:
        """Workers of a role that were asked for and find no machine to run on."""
        ...

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        """Start and drain workers until each role has as many as wanted. Returns within a few seconds."""
        ...

    async def close(self) -> None:
        """Close connections; the pools stay as they are."""
        ...

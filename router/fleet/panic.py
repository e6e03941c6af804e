"""What of discovery's conditions a router believes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from common.wire import Role
from router.fleet.endpoint import Endpoint


def believed(endpoints: Sequence[Endpoint]) -> tuple[list[Endpoint], frozenset[Role]]:
    """The endpoints as they are used, and the roles of which no readiness is believed.

    Where every worker of a role fails its readiness probe, the fault is most likely with the probes: a node that cannot
    report to the control plane has all its pods marked unready, though they serve. So that of a whole role counts for
    nothing, as in Envoy's panic mode, and the workers' own heartbeats decide. Workers that are being ended stay so.
    """
    staying = [endpoint for endpoint in endpoints if not endpoint.terminating]
    serving = {endpoint.role for endpoint in staying if endpoint.serving}
    doubted = frozenset(endpoint.role for endpoint in staying if endpoint.role not in serving)
    used = [
        replace(endpoint, serving=True) if endpoint.role in doubted and not endpoint.terminating else endpoint
        for endpoint in endpoints
    ]
    return used, doubted

"""Why no worker of a role is ready, in one line. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection

from common.wire import Role
from router.fleet.worker import Worker

SHOWN = 8
"""Workers that one line names."""


def absence_of(role: Role, known: Collection[Worker], now: float, explain: Callable[[Role, float], str]) -> str:
    """Empty when one of the workers is ready. `explain`: discovery's answer where none of the role is known."""
    workers = [worker for worker in known if worker.role == role]
    if any(worker.ready for worker in workers):
        return ""
    if not workers and (num_away := sum(worker.home == role for worker in known)):
        return f"no {role} worker is ready ({num_away} configured: they have changed their role)"
    if not workers:
        return explain(role, now) or f"no {role} worker is configured"
    listed = "; ".join(worker.describe(now) for worker in workers[:SHOWN])
    more = f"; and {len(workers) - SHOWN} more" if len(workers) > SHOWN else ""
    return f"no {role} worker is ready ({len(workers)} configured: {listed}{more})"

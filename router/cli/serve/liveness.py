"""Stop processes that hang, so that the supervisor restarts them, like the liveness probe of a kubelet.

    starting ──/health answers, not loading──> running ──consecutive failures──> SIGTERM ──grace──> SIGKILL
        └───────────────────── start timeout ─────────────────────────────────────┘

A round is one probe and the rest of its period. A round that took much longer resets the count, because the supervisor
itself did not run, for example while a laptop was suspended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence

from router.cli.serve.child import Child
from router.cli.serve.probe import Health, ask_health

log = logging.getLogger(__name__)

WORKER_ROUNDS, ROUTER_ROUNDS = 9, 6
"""Consecutive failed rounds that stop a process, equal to the failure thresholds of the chart's liveness probes."""
STARTING_PERIOD_S = 1.0
"""Probe period of a process that is starting, so that a failed start is detected quickly."""
LATE = 1.5
"""Number of periods after which a round does not count."""


class Pulse:
    """Counter of consecutive failed rounds of one process after its start, which may take `start_s`."""

    def __init__(self, limit: int, start_s: float = math.inf) -> None:
        self.limit, self.start_s = limit, start_s
        self.num_bad = 0
        self.has_started = False
        self._life = 0.0

    def count_round(self, life: float, health: Health | None, *, on_time: bool, age_s: float = 0.0) -> bool:
        """Count a round and return whether to stop the process.

        `life` identifies a run of the process, and `age_s` is its uptime. `health` is None without an address.
        """
        if life != self._life:
            self._life, self.has_started, self.num_bad = life, False, 0
        self.has_started |= health is not None and health.has_started
        if not self.has_started:
            return on_time and age_s > self.start_s
        if health is None or not on_time:
            self.num_bad = 0
            return False
        self.num_bad = self.num_bad + 1 if health.problem else 0
        if self.num_bad < self.limit:
            return False
        self.num_bad = 0
        return True


async def watch(child: Child, limit: int, period_s: float, grace_s: float, start_s: float = math.inf) -> None:
    """Probe `child` until cancelled, and stop it after `limit` failed rounds or if it does not start in `start_s`.

    It gets SIGTERM, and SIGKILL after `grace_s`.
    """
    pulse = Pulse(limit, start_s)
    while True:
        began, life = time.monotonic(), child.started_at
        round_s = period_s if pulse.has_started else min(period_s, STARTING_PERIOD_S)
        health = await _ask(child, round_s)
        await asyncio.sleep(began + round_s - time.monotonic())
        now = time.monotonic()
        if life != child.started_at or not child.alive:
            continue
        if not pulse.count_round(life, health, on_time=now - began <= LATE * round_s, age_s=now - life):
            continue
        if pulse.has_started and health is not None:
            fields = {"child": child.name, "why": health.problem, "for_s": limit * period_s, "probes": limit}
            log.error("supervisor: %s is unresponsive, stopping it", child.name, extra=fields)
        else:
            fields = {"child": child.name, "for_s": now - life}
            log.error("supervisor: %s did not start in time, stopping it", child.name, extra=fields)
        await child.end(grace_s)


async def loading(children: Sequence[Child], timeout_s: float) -> list[str]:
    """Return the names of the children that report that they are loading their model."""
    found = await asyncio.gather(*(_ask(child, timeout_s) for child in children))
    return [
        child.name
        for child, health in zip(children, found, strict=True)
        if health is not None and not health.problem and not health.has_started
    ]


async def _ask(child: Child, timeout_s: float) -> Health | None:
    address = child.http_address() if child.alive else None
    return None if address is None else await ask_health(address, timeout_s, tls=child.serves_tls)

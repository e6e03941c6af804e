"""Ends processes that hang, so that the supervisor restarts them, as a kubelet does by the chart's liveness probe.

    starting ──"/health" answers, no longer loading──> watched ──bad rounds in a row──> SIGTERM ──grace──> SIGKILL
        └──────────────────────────not for too long──────────────────────────────────────┘

A round is one probe and the rest of its period. A round that took much longer does not count and resets the count: the
supervisor itself did not run, for example because the laptop was suspended.
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
"""Bad rounds in a row that end a process: the failure thresholds of the chart's liveness probes."""
STARTING_PERIOD_S = 1.0
"""Between two looks at a process that starts, so that a failed start is seen at once."""
LATE = 1.5
"""A round that takes more than this many periods does not count."""


class Pulse:
    """Counts the bad rounds in a row of one process, beginning after its start, which may take `start_s`."""

    def __init__(self, limit: int, start_s: float = math.inf) -> None:
        self.limit, self.start_s = limit, start_s
        self.num_bad = 0
        self.has_started = False
        self._life = 0.0

    def count_round(self, life: float, health: Health | None, *, on_time: bool, age_s: float = 0.0) -> bool:
        """Count a round. True: the process must be ended.

        `life` tells one run of the process from the next, `age_s` is its age; `health` is None without an address.
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
    """Probe `child` until cancelled, and end it after `limit` bad rounds or when it has not started in `start_s`.

    SIGTERM asks it to end; SIGKILL follows after `grace_s`.
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
            said = {"child": child.name, "why": health.problem, "for_s": limit * period_s, "probes": limit}
            log.error("a process hangs, ending it", extra=said)
        else:
            log.error("a process does not start, ending it", extra={"child": child.name, "for_s": now - life})
        await child.end(grace_s)


async def loading(children: Sequence[Child], timeout_s: float) -> list[str]:
    """The names of those that answer and say that they still load their model: the first one compiles kernels, too."""
    found = await asyncio.gather(*(_ask(child, timeout_s) for child in children))
    return [
        child.name
        for child, health in zip(children, found, strict=True)
        if health is not None and not health.problem and not health.has_started
    ]


async def _ask(child: Child, timeout_s: float) -> Health | None:
    address = child.http_address() if child.alive else None
    return None if address is None else await ask_health(address, timeout_s, tls=child.serves_tls)

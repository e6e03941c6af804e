"""Explains why no worker of a role is ready, and which ready workers have no peer with the same KV layout. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from common.wire import Role
from router.fleet.worker import Worker, by_fingerprint

SHOWN = 8
"""Maximum number of workers listed in one line."""


def absence_reason(role: Role, known: Collection[Worker], now: float, explain: Callable[[Role, float], str]) -> str:
    """Return why no worker of a role is ready, or "". `explain` is discovery's answer if no worker is known."""
    workers = [worker for worker in known if worker.role == role]
    if any(worker.ready for worker in workers):
        return ""
    if not workers and (num_away := sum(worker.home == role for worker in known)):
        return f"no {role} worker is ready ({num_away} configured: all have changed their role)"
    if not workers:
        return explain(role, now) or f"no {role} worker is configured"
    listed = "; ".join(worker.describe(now) for worker in workers[:SHOWN])
    more = f"; and {len(workers) - SHOWN} more" if len(workers) > SHOWN else ""
    return f"no {role} worker is ready ({len(workers)} configured: {listed}{more})"


@dataclass(frozen=True, slots=True)
class Pairing:
    """Ids of ready workers without a ready peer of the same KV layout. Empty while a pool has no ready worker."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    impossible: bool = False
    reason: str = ""

    @classmethod
    def of(cls, prefill: Sequence[Worker], decode: Sequence[Worker]) -> Pairing:
        """Compute the pairing of all ready workers."""
        if not prefill or not decode:
            return cls()
        shared = by_fingerprint(prefill).keys() & by_fingerprint(decode).keys()
        alone = [worker for worker in (*prefill, *decode) if worker.identity.fingerprint not in shared]
        if not alone:
            return cls()
        return cls(
            tuple(worker.worker_id for worker in alone if worker.role == "prefill"),
            tuple(worker.worker_id for worker in alone if worker.role == "decode"),
            not shared,
            "KV cannot pass between " + _layouts(prefill, shared) + " and " + _layouts(decode, shared),
        )

    @property
    def note(self) -> str:
        """Warning of a router that is ready without any pair; "" if there is a pair."""
        return f"no prefill worker can serve a decode worker: {self.reason}" if self.impossible else ""


def _layouts(workers: Sequence[Worker], shared: set[str]) -> str:
    """Describe the layouts of one pool that the other does not have, or all of them if there are none."""
    groups = by_fingerprint(workers)
    lacking = {fingerprint: group for fingerprint, group in groups.items() if fingerprint not in shared} or groups
    shown = [_layout(fingerprint, group) for fingerprint, group in sorted(lacking.items())[:SHOWN]]
    return f"{workers[0].role} workers {'; '.join(shown)}"


def _layout(fingerprint: str, workers: Sequence[Worker]) -> str:
    hello = workers[0].identity
    listed = ", ".join(worker.worker_id for worker in workers[:SHOWN]) + (", ..." if len(workers) > SHOWN else "")
    blocks = f"blocks of {hello.block_size} tokens"
    return f"{listed} (model {hello.model}, {blocks}, version {hello.version}, layout {fingerprint[:12]})"

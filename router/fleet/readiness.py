"""Explains why no worker of a role is ready, and which ready workers have no peer with the same KV layout. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from common.wire import Role
from common.wire.messages import WorkerHello
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


UNKNOWN_DIFFERENCE = "unknown"
"""Reason if the hellos of two workers with different layouts do not differ in any known setting."""


@dataclass(frozen=True, slots=True)
class Unpaired:
    """A worker without a compatible worker of the other pool. `reason` is the setting in which they differ.

    `detail` lists all differences from the most similar worker of the other pool.
    """

    worker_id: str
    role: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Pairing:
    """Ready workers without a ready peer of the same KV layout, and workers of another protocol, by address.

    `impossible`: both pools have ready workers, but no pair exists. `reason` describes the layouts that differ.
    """

    unpaired: Mapping[str, Unpaired] = field(default_factory=dict)
    impossible: bool = False
    reason: str = ""

    @classmethod
    def of(cls, prefill: Sequence[Worker], decode: Sequence[Worker], others: Iterable[Worker] = ()) -> Pairing:
        """Compute the pairing of all ready workers. `others` are workers that may speak another protocol."""
        unpaired = {
            worker.address: Unpaired(worker.worker_id, worker.role, "protocol", worker.reason)
            for worker in others
            if worker.hello is not None and not worker.speaks_our_protocol
        }
        if not prefill or not decode:
            return cls(unpaired)
        pools = by_fingerprint(prefill), by_fingerprint(decode)
        shared = pools[0].keys() & pools[1].keys()
        if all(pool.keys() == shared for pool in pools):
            return cls(unpaired)
        for pool, partners in (pools, pools[::-1]):
            for layout, workers in pool.items():
                if layout in shared:
                    continue
                difference = _difference(workers[0], [group[0] for group in partners.values()])
                for worker in workers:
                    unpaired[worker.address] = Unpaired(worker.worker_id, worker.role, *difference)
        return cls(
            unpaired,
            not shared,
            "KV cannot pass between " + _layouts(prefill, shared) + " and " + _layouts(decode, shared),
        )

    def detail(self, address: str) -> str:
        """Return why a worker has no partner; "" if it has one."""
        return self.unpaired[address].detail if address in self.unpaired else ""

    def num_unpaired(self) -> dict[tuple[str, str], int]:
        """Return the number of unpaired workers by role and reason."""
        return Counter((one.role, one.reason) for one in self.unpaired.values())

    @property
    def note(self) -> str:
        """Warning of a router that is ready without any pair; "" if there is a pair."""
        return f"no prefill worker can serve a decode worker: {self.reason}" if self.impossible else ""


def _difference(worker: Worker, others: Sequence[Worker]) -> tuple[str, str]:
    """Return the first setting in which a worker differs from the most similar of others, and all differences."""
    other = min(others, key=lambda one: len(_differences(worker.identity, one.identity)))
    found = _differences(worker.identity, other.identity)
    if not found:
        return UNKNOWN_DIFFERENCE, f"its KV layout differs from that of {other.worker_id}"
    shown = ", ".join(f"{name} {ours} instead of {theirs}" for name, ours, theirs in found)
    return found[0][0], f"it cannot exchange KV with {other.worker_id}: {shown}"


def _differences(one: WorkerHello, other: WorkerHello) -> list[tuple[str, str, str]]:
    """Return the settings in which two hellos differ, with both values. Hellos of older versions list fewer."""
    ours, theirs = dict(one.layout), dict(other.layout)
    pairs = [("model", one.model, other.model)]
    pairs += [("block_size", str(one.block_size), str(other.block_size))]
    pairs += [(name, ours[name], theirs[name]) for name in ours if name in theirs]
    found = [pair for pair in pairs if pair[1] != pair[2]]
    if not found and one.weights != other.weights:
        found = [("weights", one.weights, other.weights)]
    return found


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

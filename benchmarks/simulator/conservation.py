"""What must hold at the end of every simulation: nothing is lost, nothing is left over, nothing comes from nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulator.router import SimulatedRouter
from benchmarks.simulator.workers.worker import SimulatedProcess
from benchmarks.simulator.world.errors import ConservationError
from benchmarks.simulator.world.load import SimulatedRequest
from benchmarks.simulator.world.world import World

ROUNDING = 1e-9
"""The share by which sums of bytes may differ."""


@dataclass(frozen=True, slots=True)
class Conserved:
    """Counts of a run. Computed tokens are more than those of answers where work was done twice."""

    num_requests: int
    num_answer_tokens: int
    num_computed_tokens: int
    num_prompt_tokens: int
    num_blocks: int
    num_bytes: float
    num_bytes_dropped: float


def check_conserved(
    world: World,
    processes: Sequence[SimulatedProcess],
    routers: Sequence[SimulatedRouter],
    requests: Sequence[SimulatedRequest],
) -> Conserved:
    """Raises ConservationError, and BlockError for blocks without an owner."""
    workers = [duty for process in processes for duty in process.duties.values()]
    for request in requests:
        if not request.outcome:
            raise ConservationError(f"request {request.request_id} has no end")
        if request.outcome == "ok" and request.num_tokens != request.output_len:
            got = f"{request.num_tokens} tokens instead of {request.output_len}"
            raise ConservationError(f"request {request.request_id} got {got}")
    num_answer = sum(request.num_tokens for request in requests)
    num_computed = sum(worker.num_output_tokens for worker in workers)
    if num_answer > num_computed:
        raise ConservationError(f"clients got {num_answer} tokens, workers sampled {num_computed}")
    num_blocks = 0
    for worker in workers:
        counts = worker.scheduler.check_integrity()
        if counts.owned or counts.total != worker.pool.num_blocks:
            raise ConservationError(f"{worker.name} has {counts} of {worker.pool.num_blocks} blocks, and no request")
        num_blocks += counts.total
        if num_open := len(worker.transfers()):
            raise ConservationError(f"{worker.name} has {num_open} transfers open, and no request")
    _check_bookings(routers)
    return Conserved(
        len(requests),
        num_answer,
        num_computed,
        sum(worker.num_prompt_tokens for worker in workers),
        num_blocks,
        *_bytes(world),
    )


def _check_bookings(routers: Sequence[SimulatedRouter]) -> None:
    for router in routers:
        if not router.alive:
            continue
        if router.core.states or len(router.core.waiting):
            raise ConservationError(f"{router.name.decode()} still has {len(router.core.states)} requests")
        for known in router.registry.workers.values():
            if known.bookings:
                raise ConservationError(f"{len(known.bookings)} bookings are left on {known.address}")


def _bytes(world: World) -> tuple[float, float]:
    """Bytes that crossed the links of all models, and those that were dropped with their transfers."""
    network = world.network
    for link in (link for both in world.links.values() for link in both):
        if link.flows:
            raise ConservationError(f"{len(link.flows)} flows are left on the link {link.name}")
    totals = {
        "crossed and dropped": network.num_bytes_crossed + network.num_bytes_dropped,
        "sent and dropped": sum(out.num_bytes for _, out in world.links.values()) + network.num_bytes_dropped,
        "received and dropped": sum(into.num_bytes for into, _ in world.links.values()) + network.num_bytes_dropped,
    }
    for what, total in totals.items():
        if abs(total - network.num_bytes_added) > 1.0 + ROUNDING * network.num_bytes_added:
            raise ConservationError(f"{network.num_bytes_added:.0f} bytes were shipped, {total:.0f} {what}")
    return network.num_bytes_crossed, network.num_bytes_dropped

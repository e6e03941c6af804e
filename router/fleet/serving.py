"""How the workers of a model serve: running, paused or asleep, and with which weights. Pure.

As with adapters, workers own their state, and the order with the highest version wins, whichever router issued it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common.wire.messages import ServingMode, ServingState, SetServing, WorkerHeartbeat
from router.fleet.adapters import MAX_VERSION
from router.fleet.registry import WorkerRegistry
from router.fleet.worker import Worker, WorkerState

SERVING_PROTOCOL = 13
"""First protocol version with `SetServing`."""


@dataclass(frozen=True, slots=True)
class ServingOutcome:
    """State of an order: `missing` workers have not executed it, `failures` contains error messages of workers.

    `num_done` workers have executed it. `superseded`: a newer order exists.
    """

    missing: tuple[str, ...]
    failures: tuple[str, ...]
    num_done: int
    superseded: bool


class FleetServing:
    """The newest order of one model's workers. Not thread-safe: use only from the event loop."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self._registry = registry
        self._newest = SetServing(version=0)

    @property
    def newest(self) -> SetServing:
        """The newest order. Its version is 0 before the first one."""
        return self._newest

    @property
    def mode(self) -> ServingMode:
        """The mode in which the workers serve, or will when they have executed the newest order."""
        return self._newest.mode

    @property
    def is_paused(self) -> bool:
        """Whether new requests wait for the next order: in a pause, and while an update drains the workers."""
        return self.mode in ("pause", "hold")

    @property
    def weight_version(self) -> str:
        """Version of the weights that answer new requests; "" before the first update."""
        return self._newest.weight_version

    def on_heartbeat(self, worker: Worker, beat: WorkerHeartbeat) -> tuple[SetServing | None, bool]:
        """Process a heartbeat.

        Returns the order that this worker has missed, if any, and whether it reports a new order that aborts requests.
        """
        state, aborts = beat.serving, False
        if state is not None and self._newest.version < state.version <= MAX_VERSION:
            self._learn(state)
            aborts = state.aborts
        version = state.version if state is not None else 0
        missed = version < self._newest.version and worker.identity.protocol >= SERVING_PROTOCOL
        return (self._newest if missed else None), aborts

    def order(self, order: SetServing) -> None:
        """Make an order the newest one."""
        self._newest = order
        self._registry.set_serving(order.weights_number, is_paused=self.is_paused)

    def outcome(self, order: SetServing) -> ServingOutcome:
        """Return how far an order has been executed by the workers that have loaded the model."""
        missing, failures, num_done = [], [], 0
        for worker in self.workers():
            state = worker.load.beat.serving if worker.load.beat is not None else None
            if (
                state is None
                or state.version < order.version
                or (state.version == order.version and state.status == "busy")
            ):
                missing.append(worker.name)
            elif state.version == order.version and state.status == "failed":
                failures.append(f"{worker.name}: {state.message}")
            else:
                num_done += 1
        return ServingOutcome(tuple(missing), tuple(failures), num_done, self._newest.version > order.version)

    def workers(self) -> Iterator[Worker]:
        """Return the workers that execute orders now. Others do so when they are ready."""
        states = (WorkerState.READY, WorkerState.DRAINING)
        return (worker for worker in self._registry.workers.values() if worker.state in states)

    def _learn(self, state: ServingState) -> None:
        self.order(
            SetServing(
                version=state.version,
                mode=state.mode,
                weights=state.weights,
                weights_number=state.weights_number,
                weight_version=state.weight_version,
                aborts=state.aborts,
            )
        )

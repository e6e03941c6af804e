"""What `Handovers`, which are production's, need of a decode worker in virtual time: a KV sender, reports, a metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from benchmarks.simulator.workers.transfer import Acknowledged, Advanced, Failed, Transfer
from benchmarks.simulator.world.world import TransferEnd, World
from common.engine.transfer.sender import TransferAdvanced, TransferEnded
from common.wire.messages import KVDone, KVTarget
from decode_worker.handover import HANDOVER_TIMEOUT_S, MAX_PAUSE_S, Handovers
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import DecodeSequence

if TYPE_CHECKING:
    from common.engine.transfer.sender import KVSender
    from common.engine.worker.metrics import WorkerMetrics
    from decode_worker.reporting import DecodeReports

BEHIND_S = 1e-6
"""Deadlines are checked this much later than they are."""


class HandoverSource(TransferEnd, Protocol):
    """A decode worker whose sequences go on at others."""

    world: World
    epoch: int

    @property
    def scheduler(self) -> DecodeScheduler:
        """Production's."""

    @property
    def block_bytes(self) -> int: ...

    def report(self, sequence: DecodeSequence, reason: str) -> None:
        """Tell its router what it has made since the last report, and why it ends here."""

    def refuse(self, router: bytes, request_id: str, attempt: int, phase: str, why: str) -> None:
        """Tell a router that this worker does not do it; another one may."""


class LookAgain:
    """A command without content: a deadline may be over."""


class SimulatedSender:
    """In place of `KVSender`: blocks cross simulated links."""

    failure = None
    num_dropped_frames = 0

    def __init__(self, worker: HandoverSource) -> None:
        self._worker = worker
        self._open: dict[tuple[str, int], Transfer] = {}

    def open(
        self, request_id: str, attempt: int, target: KVTarget, blocks: Sequence[int], num_ready: int, room: int,
        first_block: int,
    ) -> None:  # fmt: skip
        worker = self._worker
        world = worker.world
        transfer = self._open[request_id, attempt] = Transfer(
            world,
            worker,
            world.receivers[target.worker_id],
            request_id,
            attempt,
            room,
            worker.block_bytes,
            num_ready=num_ready,
            first_kept=first_block,
            growing=True,
        )
        transfer.announce()
        self._look_after(HANDOVER_TIMEOUT_S)

    def progress(
        self, request_id: str, attempt: int, num_ready: int, done: KVDone | None = None, blocks: Sequence[int] = ()
    ) -> None:
        transfer = self._open[request_id, attempt]
        sequence = self._worker.scheduler.find(request_id)
        if done is not None and sequence is not None:
            transfer.num_tokens = sequence.num_tokens
            self._look_after(MAX_PAUSE_S)
        transfer.progress(num_ready, computed=done is not None)

    def cancel(self, request_id: str, attempt: int, reason: str) -> None:
        transfer = self._open.pop((request_id, attempt), None)
        if transfer is not None:
            transfer.fail(by_sender=True, why=reason)

    @property
    def drops(self) -> list[Callable[[], None]]:
        """What drops each transfer."""
        return [transfer.drop for transfer in self._open.values()]

    def _look_after(self, delay_s: float) -> None:
        """Have the worker check deadlines even if it does nothing else then."""
        worker, epoch = self._worker, self._worker.epoch

        def look() -> None:
            if worker.epoch == epoch and self._open:
                worker.take(LookAgain())

        worker.world.clock.after(delay_s + BEHIND_S, look)


def event_of(command: Advanced | Acknowledged | Failed) -> TransferAdvanced | TransferEnded:
    """What a sender would tell its engine."""
    transfer = command.transfer
    if isinstance(command, Advanced):
        return TransferAdvanced(transfer.request_id, transfer.attempt, command.caught_up)
    reason = command.why if isinstance(command, Failed) else ""
    return TransferEnded(transfer.request_id, transfer.attempt, reason, 0, 0, 0.0, 0.0, 0.0)


class _Reports:
    """In place of `DecodeReports`: what hand-overs say to routers."""

    def __init__(self, worker: HandoverSource) -> None:
        self._worker = worker

    def finish(self, sequence: DecodeSequence, reason: str, now: float) -> None:
        self._worker.report(sequence, reason)

    def flush(self) -> None:
        """The turn does it at its end."""

    def fail(self, router: bytes, request_id: str, attempt: int, phase: str, why: str, *, retryable: bool) -> None:
        self._worker.refuse(router, request_id, attempt, phase, why)


class _Pauses:
    """In place of `WorkerMetrics`: how long sequences paused."""

    def __init__(self) -> None:
        self.handover_pause_seconds = self

    def observe(self, seconds: float) -> None:
        """Nothing reads them yet."""


def handovers_of(worker: HandoverSource, sender: SimulatedSender) -> Handovers:
    """Production's, over what is simulated."""
    return Handovers(
        cast("KVSender", sender),
        worker.scheduler,
        cast("DecodeReports", _Reports(worker)),
        cast("WorkerMetrics", _Pauses()),
        timeout_s=HANDOVER_TIMEOUT_S,
    )

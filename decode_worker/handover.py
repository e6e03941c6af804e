"""Hand-over (live migration) of running sequences to other decode workers. Their KV is copied during decoding.

    take ──KVGrant──> copied ──caught up──> paused: the last blocks ──KVAck──> gone
      └── failed, or out of blocks ─> decoded here ┘└── failed, or no answer ──> decoded here again

Full blocks never change, so they are sent while further tokens are sampled. When the target has all full blocks and the
sequence has a token that the target does not have, the sequence pauses, and its remaining blocks and tokens are sent.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.engine.transfer import TransferAdvanced, TransferEnded
from common.wire import pack_tokens
from common.wire.messages import HandOver, KVDone
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import DecodeSequence, RequestStatus

if TYPE_CHECKING:  # loads torch and sockets, which simulations of hand-overs do not need
    from common.engine.transfer import KVSender
    from common.engine.worker import WorkerMetrics
    from decode_worker.reporting import DecodeReports

log = logging.getLogger(__name__)
HANDOVER_TIMEOUT_S = 10.0
"""Maximum duration of a hand-over, in seconds. After it, the sequence stays on this worker."""
MAX_PAUSE_S = 2.0
"""Maximum pause of a sequence while it waits for the target, in seconds. After it, decoding resumes here."""


@dataclass(slots=True, eq=False)
class Handover:
    """State of a hand-over. `room` blocks are announced to the target; `num_ready` are full and passed to the sender.

    The target has the sequence's first `num_known_tokens` tokens. Times are engine clock, in seconds.
    """

    sequence: DecodeSequence
    order: HandOver
    num_known_tokens: int
    room: int
    began_at: float
    num_ready: int = 0
    granted: bool = False
    caught_up: bool = False
    paused_at: float = 0.0

    @property
    def key(self) -> tuple[str, int]:
        return (self.order.request_id, self.order.new_attempt)


class Handovers:
    """Hand-overs of a worker. Communicates with targets through the KV sender. The scheduler owns the blocks."""

    def __init__(
        self,
        sender: KVSender,
        scheduler: DecodeScheduler,
        reports: DecodeReports,
        metrics: WorkerMetrics,
        *,
        timeout_s: float,
    ) -> None:
        """`timeout_s` limits the whole hand-over."""
        self._sender, self._scheduler, self._timeout_s = sender, scheduler, timeout_s
        self._reports, self._metrics = reports, metrics
        self._by_key: dict[tuple[str, int], Handover] = {}
        self._keys: dict[str, tuple[str, int]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, sequence: DecodeSequence) -> bool:
        """Whether the sequence is being copied to another worker."""
        return sequence.request_id in self._keys

    # ------------------------------------------------------------ messages of the router and the target

    def take(self, router: bytes, order: HandOver, now: float) -> DecodeSequence | None:
        """Start to copy a sequence, or refuse the router's order with a reason.

        Returns a sequence whose KV is not computed yet: any worker can compute it instead.
        """
        sequence = self._scheduler.find(order.request_id)
        if sequence is None or sequence.router != router or sequence.attempt != order.attempt:
            self._refuse(router, order, f"this worker does not have attempt {order.attempt}")
        elif sequence.status is RequestStatus.LEAVING:
            self._refuse(router, order, "a hand-over of the request is already completing")
        elif sequence.status is not RequestStatus.RUNNING or sequence.num_remaining != 1:
            return sequence
        elif problem := self._begin(sequence, order, now):
            self._refuse(router, order, problem)
        return None

    def on_event(self, event: TransferAdvanced | TransferEnded, now: float) -> None:
        """Process an event of the sender: granted, caught up, acknowledged or failed."""
        handover = self._by_key.get((event.request_id, event.attempt))
        if handover is None:
            return
        if isinstance(event, TransferAdvanced):
            handover.granted = True
            handover.caught_up |= event.caught_up
        elif event.reason or not handover.paused_at:
            self._stay(handover, event.reason or "the target acknowledged KV before it was complete")
        else:
            self._leave(handover, now)

    # ------------------------------------------------------------ calls of the engine

    @property
    def wants_pause(self) -> bool:
        """Whether `pause_due` would pause a sequence."""
        return any(self._is_due(handover) for handover in self._by_key.values())

    def pause_due(self, now: float) -> None:
        """Pause sequences that are copied except for their last blocks. They must not be in a step in flight."""
        for handover in list(self._by_key.values()):
            if self._is_due(handover):
                self._pause(handover, now)

    def stepped(self) -> None:
        """After a step, send full blocks, and end hand-overs that outgrew their blocks without a grant."""
        for handover in list(self._by_key.values()):
            sequence = handover.sequence
            if not handover.granted and self._exceeds_room(handover):
                self._stay(handover, f"the target granted no blocks before the request outgrew {handover.room} blocks")
            elif sequence.status is RequestStatus.RUNNING and self._num_full(sequence) > handover.num_ready:
                handover.num_ready = self._num_full(sequence)
                self._sender.progress(*handover.key, handover.num_ready, blocks=sequence.blocks)

    def expire(self, now: float) -> None:
        for handover in list(self._by_key.values()):
            if handover.paused_at and handover.paused_at < now - MAX_PAUSE_S:
                self._stay(handover, f"the target did not answer within {MAX_PAUSE_S:g} s")
            elif handover.began_at < now - self._timeout_s:
                self._stay(handover, f"the hand-over took longer than {self._timeout_s:g} s")

    def withdraw(self, sequence: DecodeSequence) -> None:
        """End the hand-over of a sequence that will lose its blocks. None of them is sent after this returns."""
        handover = self._handover_of(sequence)
        if handover is not None:
            self._stay(handover, "its blocks are needed here")

    def cancel(self, sequence: DecodeSequence, reason: str) -> None:
        """End the hand-over of a sequence that has ended here, or gets another target."""
        handover = self._handover_of(sequence)
        if handover is not None:
            self._forget(handover, reason)
            if handover.paused_at:
                self._scheduler.resume(sequence)

    # ------------------------------------------------------------ inside

    def _begin(self, sequence: DecodeSequence, order: HandOver, now: float) -> str:
        """Start to copy a sequence. Return why that is impossible, or ""."""
        num_known = sequence.num_prompt_tokens + order.num_output_tokens
        if not sequence.num_request_tokens <= num_known <= sequence.num_tokens:
            return f"{order.num_output_tokens} of {sequence.num_output_tokens} output tokens are not from this attempt"
        self.cancel(sequence, "superseded by another hand-over")
        room = self._scheduler.blocks_for(num_known + order.num_reserved_tokens)
        handover = Handover(sequence, order, num_known, room, now, self._num_full(sequence))
        if self._exceeds_room(handover):
            return f"the request has {sequence.num_tokens} tokens, more than fit in {room} blocks"
        self._by_key[handover.key], self._keys[order.request_id] = handover, handover.key
        first_block = self._scheduler.window.first_block(sequence.num_computed - sequence.num_pending)
        self._sender.open(*handover.key, order.target, sequence.blocks, handover.num_ready, room, first_block)
        sequence.lent = True
        return ""

    def _is_due(self, handover: Handover) -> bool:
        sequence = handover.sequence
        if not handover.granted or sequence.status is not RequestStatus.RUNNING:
            return False
        # Includes tokens of steps in flight, which may fill the last slot.
        is_full = sequence.num_at_most > handover.room * self._scheduler.block_size
        return (handover.caught_up or is_full) and sequence.num_planned > handover.num_known_tokens

    def _pause(self, handover: Handover, now: float) -> None:
        sequence, known = handover.sequence, handover.num_known_tokens
        self._scheduler.pause(sequence)
        handover.paused_at = now
        num_blocks = self._scheduler.blocks_for(sequence.num_computed)
        new = sequence.token_ids[known:]
        logprobs = sequence.logprobs[known - sequence.num_request_tokens :]
        done = KVDone(
            request_id=handover.order.request_id,
            attempt=handover.order.new_attempt,
            first_token=new[0],
            logprobs=logprobs[0] if logprobs else None,
            num_cached_tokens=sequence.num_cached,
            prefill_s=sequence.prefill_s,
            computed_at=now,
            num_blocks=num_blocks,
            more_tokens=pack_tokens(new[1:]),
            more_logprobs=tuple(logprobs[1:]),
        )
        self._sender.progress(*handover.key, num_blocks, done, sequence.blocks[:num_blocks])

    def _leave(self, handover: Handover, now: float) -> None:
        sequence = handover.sequence
        self._forget(handover, "acknowledged")
        self._metrics.handover_pause_seconds.observe(now - handover.paused_at)
        self._reports.finish(sequence, "moved", now)
        self._reports.flush()
        self._scheduler.remove(sequence)

    def _stay(self, handover: Handover, reason: str) -> None:
        """End a hand-over. The sequence is decoded here."""
        log.info(
            "request %s stays on this worker, hand-over to %s failed: %s",
            handover.order.request_id,
            handover.order.target.worker_id,
            reason,
        )
        sequence = handover.sequence
        self._forget(handover, reason)
        if handover.paused_at:
            self._scheduler.resume(sequence)
        self._refuse(sequence.router, handover.order, reason)

    def _refuse(self, router: bytes, order: HandOver, reason: str) -> None:
        """Report to a router that the new attempt has failed."""
        self._reports.fail(router, order.request_id, order.new_attempt, "handover", reason, retryable=True)

    def _forget(self, handover: Handover, reason: str) -> None:
        del self._by_key[handover.key], self._keys[handover.order.request_id]
        self._sender.cancel(*handover.key, reason)
        handover.sequence.lent = False

    def _handover_of(self, sequence: DecodeSequence) -> Handover | None:
        handover = self._by_key.get(self._keys.get(sequence.request_id, ("", 0)))
        return handover if handover is not None and handover.sequence is sequence else None

    def _exceeds_room(self, handover: Handover) -> bool:
        """Whether the sequence, including steps in flight, has more tokens than fit in the target's blocks."""
        return handover.sequence.num_at_most > handover.room * self._scheduler.block_size

    def _num_full(self, sequence: DecodeSequence) -> int:
        return (sequence.num_computed - sequence.num_pending) // self._scheduler.block_size

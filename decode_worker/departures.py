"""Running sequences that another decode worker takes over: their KV is copied while they are decoded here.

    take ──KVGrant──> copied ──caught up──> paused: the last blocks ──KVAck──> gone
      └── failed, or out of room ──> decoded here ┘└── failed, or no answer ──> decoded here again, from where it was

Full blocks never change, so they travel while further tokens are sampled. Once everything full has left and a token is
there that the other worker does not know, the sequence pauses, and the blocks it has filled since go with its tokens.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from diptych.common.kv_sender import KVSender
from diptych.common.message_fields import pack_tokens
from diptych.common.messages import HandOver, KVDone
from diptych.common.outgoing_transfer import TransferAdvanced, TransferEnded
from diptych.decode_worker.recorder import Recorder
from diptych.decode_worker.reports import Reports
from diptych.decode_worker.scheduler import DecodeScheduler
from diptych.decode_worker.sequence import DecodeSequence, RequestStatus

log = logging.getLogger(__name__)
MAX_PAUSE_S = 2.0
"""How long the client of a paused sequence waits for the other worker before this one goes on."""


@dataclass(slots=True, eq=False)
class Departure:
    """One hand-over. Of `room` blocks, announced to the target, `num_ready` are full and given to the sender.

    The target knows the sequence's first `num_known_tokens` tokens. Times are engine clock, in seconds.
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


class Departures:
    """Speaks to target workers for the engine, through the KV sender, and to routers. Blocks stay the scheduler's."""

    def __init__(
        self, sender: KVSender, scheduler: DecodeScheduler, reports: Reports, recorder: Recorder, *, timeout_s: float
    ) -> None:
        """`timeout_s`: how long a hand-over may take as a whole."""
        self._sender, self._scheduler, self._timeout_s = sender, scheduler, timeout_s
        self._reports, self._recorder = reports, recorder
        self._by_key: dict[tuple[str, int], Departure] = {}
        self._keys: dict[str, tuple[str, int]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, sequence: DecodeSequence) -> bool:
        """Whether the sequence is being copied to another worker."""
        return sequence.request_id in self._keys

    @property
    def failure(self) -> BaseException | None:
        """What the sender's thread died of."""
        return self._sender.failure

    @property
    def num_dropped_frames(self) -> int:
        return self._sender.num_dropped_frames

    # ------------------------------------------------------------ what the router and the target say

    def take(self, router: bytes, order: HandOver, now: float) -> DecodeSequence | None:
        """Start to copy a sequence that is decoded here, or tell its router why not.

        Returns a sequence whose KV is not here: there is nothing to copy, and nothing lost by computing it elsewhere.
        """
        sequence = self._scheduler.find(order.request_id)
        if sequence is None or sequence.router != router or sequence.attempt != order.attempt:
            self._refuse(router, order, f"attempt {order.attempt} is not here")
        elif sequence.status is RequestStatus.LEAVING:
            self._refuse(router, order, "it is leaving already")
        elif sequence.status is not RequestStatus.RUNNING or sequence.num_remaining != 1:
            return sequence
        elif problem := self._begin(sequence, order, now):
            self._refuse(router, order, problem)
        return None

    def on_event(self, event: TransferAdvanced | TransferEnded, now: float) -> None:
        """The target made room, has what is full so far, has the sequence, or the transfer failed."""
        departure = self._by_key.get((event.request_id, event.attempt))
        if departure is None:
            return
        if isinstance(event, TransferAdvanced):
            departure.granted = True
            departure.caught_up |= event.caught_up
        elif event.reason or not departure.paused_at:
            self._stay(departure, event.reason or "the target acknowledged what it cannot have")
        else:
            self._leave(departure, now)

    # ------------------------------------------------------------ what the engine does

    @property
    def wants_pause(self) -> bool:
        """Whether `pause_due` would pause somebody, if no step were in flight."""
        return any(self._is_due(departure) for departure in self._by_key.values())

    def pause_due(self, now: float) -> None:
        """Let go of the sequences that are copied but for their last blocks. Nothing of them may be in flight."""
        for departure in list(self._by_key.values()):
            if self._is_due(departure):
                self._pause(departure, now)

    def stepped(self) -> None:
        """A step has ended: offer the blocks it has filled, and give up on what nobody made room for."""
        for departure in list(self._by_key.values()):
            sequence = departure.sequence
            if sequence.status is RequestStatus.PREEMPTED:
                self._stay(departure, "it lost its blocks meanwhile")
            elif not departure.granted and self._outruns(departure):
                self._stay(departure, f"no room for it came within {departure.room} blocks")
            elif sequence.status is RequestStatus.RUNNING and self._num_full(sequence) > departure.num_ready:
                departure.num_ready = self._num_full(sequence)
                self._sender.progress(*departure.key, departure.num_ready, blocks=sequence.blocks)

    def expire(self, now: float) -> None:
        for departure in list(self._by_key.values()):
            if departure.paused_at and departure.paused_at < now - MAX_PAUSE_S:
                self._stay(departure, f"the target did not answer within {MAX_PAUSE_S:g} s")
            elif departure.began_at < now - self._timeout_s:
                self._stay(departure, f"it took longer than {self._timeout_s:g} s")

    def cancel(self, sequence: DecodeSequence, reason: str) -> None:
        """The sequence is over here, or has another target: nobody goes on with what was copied."""
        departure = self._by_key.get(self._keys.get(sequence.request_id, ("", 0)))
        if departure is not None and departure.sequence is sequence:
            self._forget(departure, reason)
            if departure.paused_at:
                self._scheduler.resume(sequence)

    def stop(self) -> None:
        self._sender.stop()

    # ------------------------------------------------------------ inside

    def _begin(self, sequence: DecodeSequence, order: HandOver, now: float) -> str:
        """Why a sequence cannot be handed over, or "" when its blocks are on their way."""
        num_known = sequence.num_prompt_tokens + order.num_output_tokens
        if not sequence.num_request_tokens <= num_known <= sequence.num_tokens:
            return f"{order.num_output_tokens} of its {sequence.num_output_tokens} output tokens are not this attempt's"
        self.cancel(sequence, "superseded by another hand-over")
        room = self._num_blocks(num_known + order.num_reserved_tokens)
        departure = Departure(sequence, order, num_known, room, now, self._num_full(sequence))
        if self._outruns(departure):
            return f"it has {sequence.num_tokens} tokens, more than {room} blocks hold"
        self._by_key[departure.key], self._keys[order.request_id] = departure, departure.key
        self._sender.open(*departure.key, order.target, sequence.blocks, departure.num_ready, room)
        return ""

    def _is_due(self, departure: Departure) -> bool:
        sequence = departure.sequence
        if not departure.granted or sequence.status is not RequestStatus.RUNNING:
            return False
        # A step in flight may end the last place: its tokens count.
        is_full = sequence.num_at_most > departure.room * self._scheduler.block_size
        return (departure.caught_up or is_full) and sequence.num_planned > departure.num_known_tokens

    def _pause(self, departure: Departure, now: float) -> None:
        sequence, known = departure.sequence, departure.num_known_tokens
        self._scheduler.pause(sequence)
        departure.paused_at = now
        num_blocks = self._num_blocks(sequence.num_computed)
        new = sequence.token_ids[known:]
        logprobs = sequence.logprobs[known - sequence.num_request_tokens :]
        done = KVDone(
            request_id=departure.order.request_id,
            attempt=departure.order.new_attempt,
            first_token=new[0],
            logprobs=logprobs[0] if logprobs else None,
            num_cached_tokens=sequence.num_cached,
            prefill_s=sequence.prefill_s,
            computed_at=now,
            num_blocks=num_blocks,
            more_tokens=pack_tokens(new[1:]),
            more_logprobs=tuple(logprobs[1:]),
        )
        self._sender.progress(*departure.key, num_blocks, done, sequence.blocks[:num_blocks])

    def _leave(self, departure: Departure, now: float) -> None:
        sequence = departure.sequence
        self._forget(departure, "acknowledged")
        self._recorder.handed_over(now - departure.paused_at)
        self._reports.finish(sequence, "moved", now)
        self._reports.flush()
        self._scheduler.remove(sequence)

    def _stay(self, departure: Departure, reason: str) -> None:
        """The sequence goes on here."""
        log.info("request %s stays: %s", departure.order.request_id, reason)
        sequence = departure.sequence
        self._forget(departure, reason)
        if departure.paused_at:
            self._scheduler.resume(sequence)
        self._refuse(sequence.router, departure.order, reason)

    def _refuse(self, router: bytes, order: HandOver, reason: str) -> None:
        """Tell a router that nobody will go on under the new attempt."""
        self._reports.fail(router, order.request_id, order.new_attempt, "handover", reason, retryable=True)

    def _forget(self, departure: Departure, reason: str) -> None:
        del self._by_key[departure.key], self._keys[departure.order.request_id]
        self._sender.cancel(*departure.key, reason)

    def _outruns(self, departure: Departure) -> bool:
        """Whether the target could not take the sequence with the tokens that are on their way."""
        return departure.sequence.num_at_most > departure.room * self._scheduler.block_size

    def _num_full(self, sequence: DecodeSequence) -> int:
        return (sequence.num_computed - sequence.num_pending) // self._scheduler.block_size

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._scheduler.block_size)

"""Requests whose KV another worker sends. The sending side is the prefill worker, or `handover.py`.

    expected ──KVOpen──> opened ──blocks──> granted ──all received──> decoded
                 └── refused      └── no blocks in time ┘└── failed or stalled: received blocks stay cached

After another prefill worker took over, a granted request keeps its blocks for the next announcement. If that takes as
long as others may wait for blocks, it is expected again, without them.

Announcements that arrive before their request are kept for a while.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from common.engine.sequences import Fail
from common.engine.transfer import (
    IncomingTransfer,
    IncomingTransfers,
    TransferCompleted,
    TransferFailed,
    TransferOpened,
)
from common.errors import WireError
from common.latency import LinkFits
from decode_worker.reporting import DecodeCounters
from decode_worker.rules import DecodeRules
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import DecodeSequence, RequestStatus


class RemotePrefills:
    """Remote prefills of an engine. `fail` ends a request whose KV does not arrive; the router may retry elsewhere."""

    def __init__(
        self,
        transfers: IncomingTransfers,
        scheduler: DecodeScheduler,
        rules: DecodeRules,
        counters: DecodeCounters,
        fail: Fail[DecodeSequence],
        *,
        grant_timeout_s: float,
        transfer_timeout_s: float,
    ) -> None:
        self._transfers, self._scheduler, self._rules, self._counters = transfers, scheduler, rules, counters
        self._refuse, self._fail = partial(fail, retryable=False), partial(fail, retryable=True)
        self.link_fits = LinkFits()
        self._grant_timeout_s, self._transfer_timeout_s = grant_timeout_s, transfer_timeout_s
        self._expired_at = 0.0

    # ------------------------------------------------------------ events of the receiver

    def on_opened(self, event: TransferOpened) -> None:
        message, now = event.message, time.monotonic()
        sequence = self._scheduler.find(message.request_id)
        problem = self._transfers.mismatch(event)
        if problem:
            self._transfers.refuse(event.peer, message, problem)
        elif sequence is None or sequence.attempt < message.attempt:
            self._transfers.keep_early(event, now)
        elif sequence.attempt > message.attempt:
            self._transfers.refuse(event.peer, message, "superseded by a new attempt")
        elif not sequence.is_incoming:
            self._transfers.not_needed(event.peer, message)
        elif problem := sequence.mismatch(message, self._scheduler.window):
            self._transfers.refuse(event.peer, message, problem)
        elif sequence.peer == event.peer:
            self._transfers.touch(sequence, now)
        elif sequence.peer and sequence.status is RequestStatus.TRANSFERRING:
            sequence.peer = event.peer
            self._fail(sequence, "transfer", "the prefill worker reconnected, frames may be lost")
        else:
            self._begin(sequence, event, now)

    def on_failed(self, event: TransferFailed) -> None:
        self._transfers.forget_early(event.request_id, event.attempt, event.peer)
        sequence = self._scheduler.find(event.request_id)
        if sequence is None or sequence.attempt != event.attempt or not sequence.is_incoming:
            return
        if not event.by_peer or event.peer == sequence.peer:  # otherwise that peer is not the sender
            sequence.peer = b""
            if event.by_peer:  # keep nothing, the failure may have corrupted sent blocks
                self._transfers.release(sequence, "")
            if event.phase:  # the prefill worker reports the same to the router, possibly later
                self._refuse(sequence, event.phase, event.reason)
            else:
                self._fail(sequence, "transfer", f"KV transfer failed: {event.reason}")

    def on_completed(self, event: TransferCompleted) -> DecodeSequence | None:
        """Move a sequence whose KV has arrived to the running batch. Return None if its attempt has ended."""
        transfer = event.transfer
        sequence = self._scheduler.find(transfer.request_id)
        if (
            sequence is None
            or sequence.attempt != transfer.attempt
            or sequence.status is not RequestStatus.TRANSFERRING
            or transfer.done is None
        ):
            return None  # aborted or superseded in the meantime
        done = transfer.done
        sequence.peer, sequence.lent = b"", False  # the receiver returned the blocks with the last of them
        try:
            window = self._scheduler.window
            *tokens, last = self._rules.received_tokens(sequence, done, num_blocks=transfer.num_blocks, window=window)
        except WireError as error:
            self._fail(sequence, "transfer", str(error))
            return None
        sequence.transfer_s = max(transfer.last_block_at, transfer.done_at) - transfer.granted_at
        sequence.transfer_bytes = transfer.num_bytes
        # In this worker's clock, except for the latency of an idle link.
        computed_at = done.computed_at + sequence.clock_offset_s
        sequence.exposed_transfer_s = max(0.0, max(transfer.last_block_at, transfer.done_at) - computed_at)
        self._observe_link(transfer, max(computed_at, transfer.granted_at))
        sequence.prefill_s, sequence.num_cached = done.prefill_s, done.num_cached_tokens
        sequence.first_token_at = time.monotonic()
        for token in tokens:
            sequence.append(token)
        self._scheduler.start_decoding(sequence)
        self._counters.transfer_completed(sequence, transfer)
        sequence.append(last)
        return sequence

    # ------------------------------------------------------------ calls of the engine

    def expect(self, sequence: DecodeSequence) -> None:
        """Process the announcement of a new request if it arrived earlier."""
        early = self._transfers.take_early(sequence.request_id, sequence.attempt)
        if early is not None:
            self.on_opened(early)

    def refuse(self, request_id: str, attempt: int, why: str) -> None:
        """Refuse the announcement of a refused request if it arrived earlier."""
        early = self._transfers.take_early(request_id, attempt)
        if early is not None:
            self._transfers.refuse(early.peer, early.message, why)

    def grant(self, granted: Sequence[DecodeSequence], now: float) -> None:
        """Grant the blocks of these sequences to their senders, except those found in the cache."""
        for sequence in granted:
            sequence.num_received_blocks = sequence.num_computed // self._scheduler.block_size
            self._transfers.grant(sequence, sequence.num_received_blocks, now)

    def release(self, sequence: DecodeSequence, reason: str) -> None:
        """Revoke a sequence's blocks from its transfer, and set `num_received_blocks` to the number received."""
        transfer = self._transfers.release(sequence, reason)
        if transfer is not None:
            sequence.num_received_blocks = transfer.num_prefix_received

    def expire(self, now: float, *, is_held: bool) -> None:
        """Fail sequences that have waited for too long, and renew the leases of the other prefill workers.

        Those that wait for the announcement of another prefill worker only return their blocks: it may have a long
        queue, and reports its progress to their router. Time in which the engine is held does not count as a wait for
        blocks or announcements, because no block is granted then.
        """
        held_s, self._expired_at = now - self._expired_at if is_held else 0.0, now
        self._transfers.expire_early(now)
        for transfer in self._transfers.stalled(now - self._transfer_timeout_s):
            sequence = self._scheduler.find(transfer.request_id)
            if sequence is not None and sequence.attempt == transfer.attempt:
                missing = f"{transfer.num_missing} of {transfer.num_blocks - transfer.first_block} blocks missing"
                self._fail(sequence, "transfer", f"no KV received for {self._transfer_timeout_s:g} s, {missing}")
        for sequence in self._scheduler:
            is_opened = sequence.status is RequestStatus.OPENED
            if not is_opened and (sequence.status is not RequestStatus.TRANSFERRING or sequence.lent):
                continue
            sequence.opened_at = min(now, sequence.opened_at + held_s)
            is_late = sequence.opened_at < now - self._grant_timeout_s
            if not is_opened and is_late:
                self._scheduler.return_blocks(sequence, sequence.num_received_blocks)
            elif is_late:
                why = f"no free KV blocks for {sequence.num_tokens} tokens within {self._grant_timeout_s:g} s"
                self._fail(sequence, "grant", why)
            elif is_opened:
                self._transfers.renew(sequence, now)

    # ------------------------------------------------------------ inside

    def _observe_link(self, transfer: IncomingTransfer, since: float) -> None:
        """Update the link model with what arrived after `since`, when only the link limited the transfer."""
        seconds = max(0.0, max(transfer.last_block_at, transfer.done_at) - since)
        block_bytes = transfer.num_bytes // max(1, len(transfer.received))
        is_shared = transfer.transport == "shm"
        self.link_fits.observe(transfer.bytes_since(since), seconds, block_bytes, shared=is_shared)

    def _begin(self, sequence: DecodeSequence, event: TransferOpened, now: float) -> None:
        sequence.peer, sequence.opened_at, sequence.renewed_at = event.peer, now, now
        sequence.memory, sequence.quantised = event.memory, event.message.quantised
        sequence.clock_offset_s = event.received_at - event.message.sent_at
        first_block = max(event.message.first_block, self._scheduler.window.first_block(sequence.num_request_tokens))
        if sequence.status is RequestStatus.EXPECTING:
            self._scheduler.open(sequence, first_block)
        elif sequence.status is RequestStatus.TRANSFERRING:
            self._scheduler.skip_to(sequence, first_block)
            self._transfers.grant(sequence, sequence.num_received_blocks, now)

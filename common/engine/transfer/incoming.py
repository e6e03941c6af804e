"""Engine side of KV transfers: grants, refusals, lease renewals, and early announcements."""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.engine.transfer.receiver import IncomingTransfer, KVReceiver, TransferOpened
from common.engine.transfer.sender import KVSender
from common.engine.transfer.transports.interface import SenderMemory
from common.wire import COUNT_BITS, DropLog
from common.wire.messages import KVAck, KVFailed, KVGrant, KVOpen, KVWait, Message

log = logging.getLogger(__name__)
# Announcements (`KVOpen`) that arrived before their `DecodeRequest`.
MAX_EARLY_OPENS = 4096
EARLY_OPEN_S = 10.0
"""Lifetime of an early announcement, in seconds."""

RENEW_S = 1.0
"""Interval of `KVWait`, which renews the lease of a prefill worker whose prompt waits for blocks here."""


class Recipient(Protocol):
    """A request that KV is received for. `lent`: the receiver may write `blocks`. `peer` is b"" without a sender."""

    peer: bytes
    memory: SenderMemory | None
    quantised: bool
    lent: bool
    renewed_at: float
    granted_at: float

    @property
    def request_id(self) -> str: ...

    @property
    def attempt(self) -> int: ...

    @property
    def blocks(self) -> Sequence[int]: ...

    @property
    def is_growing(self) -> bool:
        """Whether the sender still computes tokens while its blocks arrive, in a hand-over."""


@dataclass(frozen=True, slots=True)
class _EarlyOpen:
    event: TransferOpened
    until: float


class IncomingTransfers:
    """Incoming transfers of an engine. The engine owns the blocks; transfers borrow them."""

    def __init__(self, receiver: KVReceiver, *, epoch: int, fingerprint: str, required: str = "") -> None:
        """`required` is the transport that must be able to read the sender's memory here, or "" to allow frames."""
        self._receiver, self._epoch, self._fingerprint = receiver, epoch, fingerprint
        self._required = required
        self._early: OrderedDict[tuple[str, int], _EarlyOpen] = OrderedDict()
        self._mismatches = DropLog(log, "an announcement of KV")

    def mismatch(self, event: TransferOpened) -> str:
        """Return why this worker must not receive from the sender, or "".

        Only the log names the epoch and layout of this worker, because the sender may be a stranger.
        """
        message, own = event.message, ""
        if message.decode_epoch != self._epoch:
            reason, own = f"sent to boot epoch {message.decode_epoch}, which is not this worker's", str(self._epoch)
        elif message.fingerprint != self._fingerprint:
            reason, own = f"KV layout {message.fingerprint} differs from this worker's", self._fingerprint
        if own:
            self._mismatches.add(f"{message.worker_id}: {reason}, {own}", event.received_at)
            return reason
        if self._required and event.memory is None:
            return f"kv_transport is {self._required}, but this worker cannot read the memory of {message.worker_id}"
        return ""

    def keep_early(self, event: TransferOpened, now: float) -> None:
        """Keep an announcement whose request has not arrived yet."""
        self._early[(event.message.request_id, event.message.attempt)] = _EarlyOpen(event, now + EARLY_OPEN_S)
        if len(self._early) > MAX_EARLY_OPENS:
            _, oldest = self._early.popitem(last=False)
            self.refuse(oldest.event.peer, oldest.event.message, "too many unknown requests")

    def forget_early(self, request_id: str, attempt: int, peer: bytes) -> None:
        """Drop an announcement after its prefill worker gave up."""
        early = self._early.get((request_id, attempt))
        if early is not None and early.event.peer == peer:
            del self._early[request_id, attempt]

    def take_early(self, request_id: str, attempt: int) -> TransferOpened | None:
        early = self._early.pop((request_id, attempt), None)
        return early.event if early else None

    def take_early_if(self, wanted: Callable[[KVOpen], bool]) -> list[TransferOpened]:
        """Take all announcements that are wanted, in order of arrival."""
        keys = [key for key, early in self._early.items() if wanted(early.event.message)]
        return [self._early.pop(key).event for key in keys]

    def expire_early(self, now: float) -> None:
        self._mismatches.flush(now)
        while self._early:
            key, early = next(iter(self._early.items()))
            if early.until > now:
                break
            del self._early[key]
            self.refuse(early.event.peer, early.event.message, "unknown request")

    def grant(self, recipient: Recipient, first_block: int, now: float) -> None:
        """Lend the recipient's blocks to the receiver, and grant the sender the blocks from `first_block` on."""
        recipient.granted_at = now
        request_id, attempt, memory = recipient.request_id, recipient.attempt, recipient.memory
        blocks = tuple(recipient.blocks)
        token = secrets.randbits(COUNT_BITS)
        shared = memory is not None
        quantised = recipient.quantised and not shared and self._receiver.accepts_quantised
        transfer = IncomingTransfer(request_id, attempt, recipient.peer, blocks, first_block, now, now)
        transfer.memory, transfer.token, transfer.quantised = memory, token, quantised
        recipient.lent = True
        self._receiver.expect(transfer)
        grant = KVGrant(
            request_id=request_id,
            attempt=attempt,
            first_block=first_block,
            shared=shared,
            token=token,
            quantised=quantised,
        )
        self._send_to(recipient.peer, grant)

    def renew(self, recipient: Recipient, now: float) -> None:
        """Renew the lease of a prefill worker whose prompt still waits for blocks here, every RENEW_S."""
        if now - recipient.renewed_at >= RENEW_S:
            recipient.renewed_at = now
            self._send_to(recipient.peer, KVWait(request_id=recipient.request_id, attempt=recipient.attempt))

    def touch(self, recipient: Recipient, now: float) -> None:
        """Record that the sender still computes. In a hand-over, confirm that everything sent before has arrived."""
        self._receiver.touch(recipient.request_id, recipient.attempt, now)
        if recipient.is_growing:
            self._send_to(recipient.peer, KVWait(request_id=recipient.request_id, attempt=recipient.attempt))

    def not_needed(self, peer: bytes, message: KVOpen) -> None:
        """Acknowledge KV that this worker already has or computes itself."""
        self._send_to(peer, KVAck(request_id=message.request_id, attempt=message.attempt))

    def acknowledge(self, recipient: Recipient) -> None:
        """Acknowledge a transfer whose KV is no longer needed, and end it without notifying its sender again."""
        self._send_to(recipient.peer, KVAck(request_id=recipient.request_id, attempt=recipient.attempt))

    def refuse(self, peer: bytes, message: KVOpen, reason: str) -> None:
        self._send_to(peer, KVFailed(request_id=message.request_id, attempt=message.attempt, reason=reason))

    def release(self, recipient: Recipient, reason: str) -> IncomingTransfer | None:
        """Revoke lent blocks, and send the prefill worker the `reason` unless it is ""."""
        transfer = self._receiver.release(recipient.request_id, recipient.attempt)
        if recipient.peer and reason:
            self._send_to(
                recipient.peer,
                KVFailed(request_id=recipient.request_id, attempt=recipient.attempt, reason=reason[:1000]),
            )
        recipient.peer, recipient.lent = b"", False
        return transfer

    def stalled(self, before: float) -> list[IncomingTransfer]:
        return self._receiver.stalled(before)

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the receiver thread."""
        return self._receiver.failure

    @property
    def num_dropped_frames(self) -> int:
        return self._receiver.num_dropped_frames

    def stop(self) -> None:
        self._receiver.stop()

    def _send_to(self, peer: bytes, message: Message) -> None:
        self._receiver.send(peer, message)


@dataclass(frozen=True, slots=True)
class TransferEndpoints:
    """Both ends of a decode worker's transfers: incoming KV of prefills and hand-overs, outgoing KV of hand-overs."""

    incoming: IncomingTransfers
    outgoing: KVSender

    def check(self) -> None:
        """Raise RuntimeError if the thread of either end has died."""
        for name, failure in (("receiver", self.incoming.failure), ("sender", self.outgoing.failure)):
            if failure is not None:
                raise RuntimeError(f"the KV {name} thread has died") from failure

    @property
    def num_dropped_frames(self) -> int:
        return self.incoming.num_dropped_frames + self.outgoing.num_dropped_frames

    def stop(self) -> None:
        self.incoming.stop()
        self.outgoing.stop()

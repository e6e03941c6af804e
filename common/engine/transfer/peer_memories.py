"""Memory of other workers that this worker reads, from the first offer until the owner's death."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from common.engine.transfer.transports.interface import IncomingEnd, SenderMemory
from common.errors import DiptychError
from common.wire.messages import KVOpen

log = logging.getLogger(__name__)
MAX_WORKERS = 256
"""Maximum number of remembered offers: more than the workers of a host, but bounded against hostile peers."""
RETRY_S = 30.0
"""Retry interval, in seconds, for a rejected offer. Its cause (open files, memory, permissions) may be temporary."""

_Key = tuple[str, int, str, bytes]  # worker ID, boot epoch, transport and details of its offer


@dataclass(frozen=True, slots=True)
class _Refused:
    """Offer that could not be accepted, the reason, and the time of the next attempt."""

    why: str
    until: float


class PeerMemories:
    """Accepted and rejected offers. Used only by the receiver's thread. Logs a rejection when its reason changes."""

    def __init__(self, transports: Sequence[IncomingEnd[Any]], clock: Callable[[], float] = time.monotonic) -> None:
        """Offers of transports not in `transports` are rejected."""
        self._transports = {transport.transport: transport for transport in transports}
        self._clock = clock
        self._known: OrderedDict[_Key, SenderMemory | _Refused] = OrderedDict()
        self._poller: zmq.Poller | None = None

    def watch(self, poller: zmq.Poller) -> None:
        """Let `poller` wake its thread when the owner of a memory dies."""
        self._poller = poller

    def of(self, opened: KVOpen) -> SenderMemory | None:
        """Return the memory that a sender offers, or None if it is unreadable. Raises WireError if malformed."""
        offer = opened.offer
        key = (opened.worker_id, opened.epoch, *((offer.transport, offer.details) if offer is not None else ("", b"")))
        known = self._known.get(key)
        transport = self._transports.get(offer.transport) if offer is not None else None
        details = offer.read(transport.details) if offer is not None and transport is not None else None
        if known is None:
            self._drop_former(opened)
        if isinstance(known, SenderMemory) and known.failed:
            self._release(known)
            known = self._known[key] = self._refuse(opened, known.failed, "")
        if known is None or (isinstance(known, _Refused) and known.until <= self._clock()):
            known = self._known[key] = self._open(opened, transport, details, known.why if known else "")
            if len(self._known) > MAX_WORKERS:
                _, oldest = self._known.popitem(last=False)
                self._release(oldest)
        self._known.move_to_end(key)
        return None if isinstance(known, _Refused) else known

    def drop_dead(self, ready: Container[object]) -> None:
        """Unmap the memory of owners that died, according to their descriptors in `ready`."""
        for key, memory in list(self._known.items()):
            if isinstance(memory, SenderMemory) and memory.process is not None and memory.process in ready:
                log.info("%s exited: unmapped its KV memory", key[0])
                del self._known[key]
                self._release(memory)

    def _drop_former(self, opened: KVOpen) -> None:
        """Release what the worker offered in an earlier epoch. Its process may still run and keep the pages."""
        for key, memory in list(self._known.items()):
            if key[0] == opened.worker_id and key[1] < opened.epoch:
                del self._known[key]
                self._release(memory)

    def close(self) -> None:
        for memory in self._known.values():
            self._release(memory)
        self._known.clear()

    def _open(
        self,
        opened: KVOpen,
        transport: IncomingEnd[Any] | None,
        details: msgspec.Struct | None,
        refused_before: str,
    ) -> SenderMemory | _Refused:
        """Accept an offer. `refused_before`: reason of the last rejection, or ""."""
        if opened.offer is None:
            return self._refuse(opened, "no memory was offered", refused_before)
        if transport is None:
            why = f"this worker's --kv-transport does not accept {opened.offer.transport}"
            return self._refuse(opened, why, refused_before)
        try:
            memory = transport.accept(details)
        except DiptychError as error:
            return self._refuse(opened, str(error), refused_before)
        log.info("KV transfer from %s: %s", opened.worker_id, memory.description)
        if self._poller is not None and memory.process is not None:
            self._poller.register(memory.process, zmq.POLLIN)
        return memory

    def _refuse(self, opened: KVOpen, why: str, refused_before: str) -> _Refused:
        if why != refused_before:
            log.info("KV transfer from %s: TCP (%s)", opened.worker_id, why)
        return _Refused(why, self._clock() + RETRY_S)

    def _release(self, memory: SenderMemory | _Refused) -> None:
        if isinstance(memory, _Refused):
            return
        if self._poller is not None and memory.process is not None:
            self._poller.unregister(memory.process)
        memory.close()

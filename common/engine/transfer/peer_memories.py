"""The memories of other workers that this worker reads, from their first offer until their death."""

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
"""How many offers of memory this worker remembers: more than a host has workers, few enough for hostile ones."""
RETRY_S = 30.0
"""How long until a refused offer is tried again: its cause (open files, memory, rights) may be gone."""

_Key = tuple[str, int, str, bytes]  # worker, boot epoch, transport and details of its offer


@dataclass(frozen=True, slots=True)
class _Refused:
    """An offer that could not be taken, why, and when it is tried again."""

    why: str
    until: float


class PeerMemories:
    """Used by the receiver's thread only. A refusal is logged once, and again when its cause changes."""

    def __init__(self, transports: Sequence[IncomingEnd[Any]], clock: Callable[[], float] = time.monotonic) -> None:
        """Offers of other transports are refused."""
        self._transports = {transport.transport: transport for transport in transports}
        self._clock = clock
        self._known: OrderedDict[_Key, SenderMemory | _Refused] = OrderedDict()
        self._poller: zmq.Poller | None = None

    def watch(self, poller: zmq.Poller) -> None:
        """Let `poller` wake its thread when the owner of a memory dies."""
        self._poller = poller

    def of(self, opened: KVOpen) -> SenderMemory | None:
        """The memory that a sender offers, if this process can read it. Raises WireError for a malformed offer."""
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
        """Unmap the memories whose owner died, as its descriptor in `ready` says: the last map keeps their pages."""
        for key, memory in list(self._known.items()):
            if isinstance(memory, SenderMemory) and memory.process is not None and memory.process in ready:
                log.info("%s is gone: its memory is unmapped", key[0])
                del self._known[key]
                self._release(memory)

    def _drop_former(self, opened: KVOpen) -> None:
        """Leave what the worker offered in an earlier duty: its process may live on, and with it the pages."""
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
        """Accept an offer; `refused_before` is why that failed the last time, or ""."""
        if opened.offer is None:
            return self._refuse(opened, "no memory is offered", refused_before)
        if transport is None:
            return self._refuse(opened, f"{opened.offer.transport} is not used here (kv_transport)", refused_before)
        try:
            memory = transport.accept(details)
        except DiptychError as error:
            return self._refuse(opened, str(error), refused_before)
        log.info("KV from %s %s", opened.worker_id, memory.in_words)
        if self._poller is not None and memory.process is not None:
            self._poller.register(memory.process, zmq.POLLIN)
        return memory

    def _refuse(self, opened: KVOpen, why: str, refused_before: str) -> _Refused:
        if why != refused_before:
            log.info("KV from %s comes over TCP: %s", opened.worker_id, why)
        return _Refused(why, self._clock() + RETRY_S)

    def _release(self, memory: SenderMemory | _Refused) -> None:
        if isinstance(memory, _Refused):
            return
        if self._poller is not None and memory.process is not None:
            self._poller.unregister(memory.process)
        memory.close()

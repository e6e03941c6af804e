"""The memories of prefill workers that this worker reads, from their first offer until their death."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass

import zmq

from common.engine.kv import ImportedMemory, NotShared, PeerMemory, Reached
from common.engine.transfer.incoming import SenderMemory
from common.engine.transfer.nixl_agent import NixlError
from common.engine.transfer.remote_memory import RemoteMemory
from common.engine.transfer.remote_reads import RemoteReads
from common.errors import DiptychError
from common.wire.messages import KVDevice, KVMemory, KVOpen, KVRemote

log = logging.getLogger(__name__)
MAX_WORKERS = 256
"""How many offers of memory this worker remembers: more than a host has workers, few enough for hostile ones."""
MOST_REACHED = 2**30
"""Bytes of a ring that this worker's device may pin: several times the ring of any worker."""
RETRY_S = 30.0
"""How long until a refused offer is tried again: its cause (open files, memory, rights) may be gone."""

_Offer = KVDevice | KVRemote | KVMemory
_Key = tuple[str, int, bytes]  # worker, boot epoch, nonce of its offer, its secret or the name of its agent


@dataclass(frozen=True, slots=True)
class _Refused:
    """An offer that could not be taken, why, and when it is tried again."""

    why: str
    until: float


class PeerMemories:
    """Used by the receiver's thread only. A refusal is logged once, and again when its cause changes."""

    def __init__(self, share: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._clock = share, clock
        self._known: OrderedDict[_Key, SenderMemory | _Refused] = OrderedDict()
        self._poller: zmq.Poller | None = None
        self._reads: RemoteReads | None = None
        self._reach: Callable[[PeerMemory], Reached] | None = None
        self._import: Callable[[KVDevice], ImportedMemory] | None = None

    def reach_with(self, reach: Callable[[PeerMemory], Reached]) -> None:
        """Let this worker's device itself copy out of rings, as far as `reach` can. Call it before the first offer."""
        self._reach = reach

    def import_with(self, open_device: Callable[[KVDevice], ImportedMemory]) -> None:
        """Let this worker's GPU copy out of others'. Call it before the first offer."""
        self._import = open_device

    def read_with(self, reads: RemoteReads) -> None:
        """Read memories that are offered for NIXL. Call it before the first offer."""
        self._reads = reads

    def watch(self, poller: zmq.Poller) -> None:
        """Let `poller` wake its thread when the owner of a memory dies."""
        self._poller = poller

    def of(self, opened: KVOpen) -> SenderMemory | None:
        """The memory that a prefill worker offers, if this process can read it."""
        offer = opened.device or opened.remote or opened.memory or opened.ring
        key = (opened.worker_id, opened.epoch, _secret_of(offer))
        known = self._known.get(key)
        if known is None:
            self._drop_former(opened)
        if isinstance(known, RemoteMemory) and known.failed:
            known = self._known[key] = self._refuse(opened, known.failed, "")
        if known is None or (isinstance(known, _Refused) and known.until <= self._clock()):
            known = self._known[key] = self._open(opened, offer, known.why if known else "")
            if len(self._known) > MAX_WORKERS:
                _, oldest = self._known.popitem(last=False)
                self._release(oldest)
        self._known.move_to_end(key)
        return None if isinstance(known, _Refused) else known

    def drop_dead(self, ready: Container[object]) -> None:
        """Unmap the memories whose owner died, as its descriptor in `ready` says: the last map keeps their pages."""
        for key, memory in list(self._known.items()):
            if isinstance(memory, PeerMemory | ImportedMemory) and memory.process in ready:
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

    def _open(self, opened: KVOpen, offer: _Offer | None, refused_before: str) -> SenderMemory | _Refused:
        """Connect to the offered memory, or map it; `refused_before` is why that failed the last time, or ""."""
        if isinstance(offer, KVRemote):
            return self._connect(opened, offer, refused_before)
        if isinstance(offer, KVDevice):
            return self._imported(opened, offer, refused_before)
        if offer is None:
            why = "no memory is offered"
        elif not self._share:
            why = "shared memory is not used here"
        else:
            try:
                memory = PeerMemory(offer, is_ring=opened.memory is None)
            except NotShared as error:
                why = str(error)
            else:
                log.info("KV from %s comes through shared memory%s", opened.worker_id, self._reached(memory))
                self._watch(memory)
                return memory
        return self._refuse(opened, why, refused_before)

    def _connect(self, opened: KVOpen, offer: KVRemote, refused_before: str) -> RemoteMemory | _Refused:
        if self._reads is None:
            return self._refuse(opened, "NIXL is not used here (kv_transport)", refused_before)
        try:
            memory = self._reads.connect(offer)
        except NixlError as error:
            return self._refuse(opened, str(error), refused_before)
        log.info("KV from %s is read with NIXL", opened.worker_id)
        return memory

    def _imported(self, opened: KVOpen, offer: KVDevice, refused_before: str) -> ImportedMemory | _Refused:
        if self._import is None:
            return self._refuse(opened, "memory of GPUs is not read here (kv_transport)", refused_before)
        try:
            memory = self._import(offer)
        except DiptychError as error:
            return self._refuse(opened, str(error), refused_before)
        log.info("KV from %s is copied from GPU to GPU", opened.worker_id)
        self._watch(memory)
        return memory

    def _watch(self, memory: PeerMemory | ImportedMemory) -> None:
        """Its owner's death wakes the thread from now on."""
        if self._poller is not None:
            self._poller.register(memory.process, zmq.POLLIN)

    def _refuse(self, opened: KVOpen, why: str, refused_before: str) -> _Refused:
        if why != refused_before:
            log.info("KV from %s comes over TCP: %s", opened.worker_id, why)
        return _Refused(why, self._clock() + RETRY_S)

    def _reached(self, memory: PeerMemory) -> str:
        """Let the device reach a ring, if it can: how blocks get from there into the cache, for the log."""
        if self._reach is None:
            return ""
        if not memory.is_ring:
            return " and this worker's own buffers: it is a whole cache, too much to pin"
        if memory.offer.num_bytes > MOST_REACHED:
            return f" and this worker's own buffers: a ring of {memory.offer.num_bytes:,} bytes is too much to pin"
        try:
            memory.reached = self._reach(memory)
        except DiptychError as error:
            return f" and this worker's own buffers: {error}"
        return ", copied into the cache without a buffer"

    def _release(self, memory: SenderMemory | _Refused) -> None:
        if isinstance(memory, _Refused):
            return
        if isinstance(memory, RemoteMemory):
            if self._reads is not None:
                self._reads.disconnect(memory)
            return
        if self._poller is not None:
            self._poller.unregister(memory.process)
        memory.close()


def _secret_of(offer: _Offer | None) -> bytes:
    """What tells an offer from others of the same worker."""
    if isinstance(offer, KVDevice):
        return offer.name.encode()
    if isinstance(offer, KVRemote):
        return offer.agent.encode()
    return offer.nonce if offer is not None else b""
